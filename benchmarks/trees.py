"""Which draft tree is fastest here: every tree on the same prompts in one run, for each shipped head.

    python benchmarks/trees.py --out docs/benchmarks
    python benchmarks/trees.py --heads eagle3 --trees chain:4 dynamic:12,4,4 --out /tmp/trees

Greedy, float32, batch 1; medians over repeats of the ratio to transformers' generate() in the same repeat. Trees are
named as on the command line; a tree deeper than a Medusa head has heads is left out for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import decoders, environment, report, runner, shipped
from specheads.bench.decoders import REFERENCE
from specheads.bench.prompts import held_out_prompts
from specheads.cli.commands.arguments import parse_tree
from specheads.decoding.generation import prompt_batches

TREES = (
    "chain:2", "chain:3", "chain:4", "chain:5", "chain:6", "comb:3", "comb:4", "comb:5", "comb:6", "static:8",
    "static:16", "dynamic:12,4,4", "dynamic:16,5,4",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="the folder of base/ and the heads (default: shipped)")
    parser.add_argument("--out", type=Path, required=True, help="the folder for trees.md and trees.json")
    parser.add_argument("--heads", nargs="+", default=["medusa", "eagle", "eagle3"])
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    folder = shipped.find_base(options.checkpoints)
    base, tokenizer = shipped.load_base(folder, "cpu")
    prompts = held_out_prompts(tokenizer, options.num_prompts, held_out=shipped.held_out_names(folder))
    batches = prompt_batches.batches(tokenizer, prompts, base.device, 1)
    where = environment.environment()
    command = "python benchmarks/trees.py " + " ".join(sys.argv[1:])
    text = [
        "# Trees\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"{options.num_prompts} prompts out of held-out files, {options.max_new_tokens} new tokens, greedy, float32, "
        f"batch 1; medians of {options.repeats} interleaved repeats, the slowest and fastest beside them.\n",
    ]  # fmt: skip
    record: dict[str, Any] = {"command": command, "environment": where}
    for name in options.heads:
        (model,) = shipped.load_heads(base, folder.parent, [name]).values()
        plans = {"default": None} | {tree: parse_tree(tree, model.head) for tree in options.trees}
        deepest = model.head.fixed_depth
        plans = {tree: plan for tree, plan in plans.items() if not plan or not deepest or plan.depth <= deepest}
        racers = {REFERENCE: decoders.transformers_generate(base, options.max_new_tokens)}
        racers |= {tree: decoders.drafted(model, options.max_new_tokens, plan=plan) for tree, plan in plans.items()}
        with terminal.progress(terminal.make_console(stderr=True), name) as told:
            race = runner.race(racers, batches, repeats=options.repeats, report=told)
        rows = []
        for tree in plans:
            ratios = sorted(a / b for a, b in zip(race.speeds(tree), race.speeds(REFERENCE), strict=True))
            figures = {
                "speed_up": race.speed_up(tree, REFERENCE), "least": ratios[0], "most": ratios[-1],
                "accepted_length": race.accepted_length(tree), "identical": not race.differing(tree, REFERENCE),
            }  # fmt: skip
            record.setdefault(name, {})[tree] = figures
            rows.append([
                tree, f"{figures['speed_up']:.2f}×", f"{ratios[0]:.2f}–{ratios[-1]:.2f}",
                f"{figures['accepted_length']:.2f}", "yes" if figures["identical"] else "NO",
            ])  # fmt: skip
        text += [f"## {name}\n", report.markdown(("tree", "speed-up", "range", "accepted length", "same text"), rows)]
    report.write(options.out, "trees", "\n".join(text), record)
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
