"""Drafters without training against transformers' own: a draft model against its assisted generation, n-grams against
its prompt lookup, each pair with the same model and the same number of tokens.

    python train/base_model.py --output_dir out/small --init checkpoints/base --layers 2 --teacher checkpoints/base
    python benchmarks/drafters.py --small out/small --out docs/benchmarks

Greedy, float32, batch 1. All decoders run on the same prompts in turn; figures are medians over repeats, and ratios are
medians of the ratios inside one repeat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

import specheads
from specheads import terminal
from specheads.bench import decoders, environment, report, runner, shipped
from specheads.bench.decoders import REFERENCE
from specheads.bench.prompts import held_out_prompts
from specheads.decoding.generation import prompt_batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, required=True, help="the draft model")
    parser.add_argument("--checkpoints", type=Path, help="the folder of base/ (default: shipped)")
    parser.add_argument("--out", type=Path, required=True, help="the folder for drafters.md and drafters.json")
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--require", action="store_true", help="exit 1 if one of ours is slower than its counterpart")
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    folder = shipped.find_base(options.checkpoints)
    base, tokenizer = shipped.load_base(folder, "cpu")
    small, _ = shipped.load_base(options.small, "cpu")
    prompts = held_out_prompts(tokenizer, options.num_prompts, 64, shipped.held_out_names(folder))

    length = options.max_new_tokens
    racers = {REFERENCE: decoders.transformers_generate(base, length)}
    pairs: dict[str, str] = {}  # ours → theirs

    def pair(name: str, theirs: runner.Decoder, drafter: Any, plan: Any = None) -> None:
        other, own = f"transformers, {name}", f"specheads, {name}"
        pairs[own] = other
        racers[other], racers[own] = theirs, decoders.drafted(base, length, draft=drafter, plan=plan)

    drafter = specheads.DraftModel(small)
    for gamma in options.gammas:
        fixed = {"num_assistant_tokens": gamma, "num_assistant_tokens_schedule": "constant"}
        theirs = decoders.assisted(base, small, length, **fixed, assistant_confidence_threshold=0.0)
        pair(f"draft model, γ = {gamma}", theirs, drafter, specheads.chain(gamma))
    unsure = {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"}
    theirs = decoders.assisted(base, small, length, **unsure, assistant_confidence_threshold=0.4)
    pair("draft model while sure", theirs, drafter, specheads.AdaptiveChain())
    theirs = decoders.transformers_generate(base, length, prompt_lookup_num_tokens=10)
    pair("prompt lookup, 10 tokens", theirs, specheads.PromptLookup(num_tokens=10))

    with terminal.progress(terminal.make_console(stderr=True), "drafters") as tell:
        batches = prompt_batches.batches(tokenizer, prompts, base.device)
        result = runner.race(racers, batches, repeats=options.repeats, report=tell)
    rows = report.summary(result, REFERENCE)
    ratios = {own: result.speed_up(own, other) for own, other in pairs.items()}
    where = environment.environment()
    command = "python benchmarks/drafters.py " + " ".join(sys.argv[1:])
    cells = [[*report.cells(n, r), f"{ratios[n]:.2f}×" if n in ratios else "–"] for n, r in rows.items()]
    text = "\n".join([
        "# Drafters without training\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"{options.num_prompts} prompts of 64 tokens out of held-out files, {length} new tokens, greedy, float32; "
        f"target {base.num_parameters() / 1e6:.1f}M parameters, draft model {small.num_parameters() / 1e6:.1f}M; "
        f"medians of {options.repeats} interleaved repeats.\n",
        report.markdown((*report.COLUMNS, "over transformers' own"), cells),
    ])  # fmt: skip
    report.write(options.out, "drafters", text, {
        "command": command, "environment": where, "decoders": rows, "over_transformers": ratios
    })  # fmt: skip
    print(text)
    return int(options.require and min(ratios.values()) < 1)


if __name__ == "__main__":
    sys.exit(main())
