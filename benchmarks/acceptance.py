"""What accepting costs: the share of a step that each rule takes to walk the verified tree.

    python benchmarks/acceptance.py --out docs/benchmarks
    python benchmarks/acceptance.py --small out/small --repeats 3 --out docs/benchmarks/draft_model

EAGLE-3, or a draft model, float32, batch 1, greedy and at temperature 1, every rule on the same prompts and on chains
and branching trees. Timed around walk(); keeping the draft's distribution, where a rule needs it, counts as drafting.
Medians over all steps of all repeats, in each of which every rule has its turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from transformers.utils import logging as hf_logging

import specheads
from specheads.bench import environment, report, shipped
from specheads.bench.prompts import held_out_prompts
from specheads.decoding.acceptance import walk
from specheads.decoding.generation import prompt_batches

RULES: dict[str, specheads.Acceptance] = {
    "Exact": specheads.Exact(),
    "Block": specheads.Block(),
    "Traversal": specheads.Traversal(),
    "Lenient": specheads.Lenient(0.5),
    "Typical": specheads.Typical(),
    "TopN": specheads.TopN(),
    "Margin": specheads.Margin(0.9),
    "CSLeniency": specheads.CSLeniency(3),
    "NoResidual": specheads.NoResidual(),
    "Ensemble": specheads.Ensemble(0.7),
    **{
        f"Fuzzy {name}": specheads.Fuzzy(0.3, name)
        for name in ("kl", "kl_reversed", "js", "js_paper", "tv", "top_k_js", "top_p_js", "random")
    },
    "Fuzzy js, rescue": specheads.Fuzzy(0.3, "js", mode="rescue"),
}
TREES = {
    "greedy, chain of 7": (0.0, specheads.chain(7)),
    "greedy, dynamic 16": (0.0, specheads.DynamicTree(16, 5, 4)),
    "T = 1, sampled chain of 7": (1.0, specheads.SampledTree((1,) * 7)),
    "T = 1, sampled 2 × 2 × 1": (1.0, specheads.SampledTree((2, 2, 1))),
    "T = 1, chain of 7 likeliest": (1.0, specheads.chain(7)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="the folder of base/ and the head (default: shipped)")
    parser.add_argument("--head", default="eagle3", help="which of them")
    parser.add_argument("--small", type=Path, help="a draft model to draft in place of a head")
    parser.add_argument("--out", type=Path, required=True, help="the folder for acceptance.md and .json")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    folder = shipped.find_base(options.checkpoints)
    base, tokenizer = shipped.load_base(folder, "cpu")
    if options.small:
        small, _ = shipped.load_base(options.small, "cpu")
        run, drafts = partial(specheads.generate, base, drafter=specheads.DraftModel(small)), "a draft model"
    else:
        (model,) = shipped.load_heads(base, folder.parent, [options.head]).values()
        run, drafts = model.generate, options.head
    prompts = held_out_prompts(tokenizer, options.num_prompts, 64, shipped.held_out_names(folder))
    batches = prompt_batches.batches(tokenizer, prompts, base.device)
    shares: dict[str, dict[str, list[float]]] = {rule: {tree: [] for tree in TREES} for rule in RULES}
    for _, (rule, accept), (tree, (temperature, plan)) in product(range(options.repeats), RULES.items(), TREES.items()):
        if rule == "Block" and isinstance(plan, specheads.SampledTree) and max(plan.branches) > 1:
            continue  # it judges chains only
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        ask = {"max_new_tokens": options.max_new_tokens, "tree": plan, "accept": accept, "seed": 0, **sampling}
        shares[rule][tree] += of_steps(run, batches, ask)
    record = {rule: {tree: median(own) if own else None for tree, own in row.items()} for rule, row in shares.items()}
    where = environment.environment()
    command = "python benchmarks/acceptance.py " + " ".join(sys.argv[1:])
    rows = [
        [rule, *("–" if value is None else f"{value:.1%}" for value in row.values())] for rule, row in record.items()
    ]
    text = "\n".join([
        "# What accepting costs\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"Share of a step, {drafts}, vocabulary {base.config.vocab_size:,}, float32, batch 1; medians over the "
        "steps.\n", report.markdown(("rule", *TREES), rows),
    ])  # fmt: skip
    report.write(options.out, "acceptance", text, {"command": command, "environment": where, "shares": record})
    print(text)
    return 0


def of_steps(run: Callable[..., Any], batches: list[dict[str, Any]], ask: dict[str, Any]) -> list[float]:
    """walk()'s share of each step."""
    shares = []
    for batch in [batches[0], *batches]:  # the first once more, as a warm-up
        walked: list[float] = []

        def timed(*args: Any, _walked: list[float] = walked, **kwargs: Any) -> Any:
            began = time.perf_counter()
            verdict = walk(*args, **kwargs)
            _walked.append(time.perf_counter() - began)
            return verdict

        with mock.patch("specheads.decoding.loop.walk", timed):
            steps = run(**batch, **ask, return_dict_in_generate=True).steps
        shares.append([own / step.seconds for own, step in zip(walked, steps[1:], strict=True)])
    return [one for batch in shares[1:] for one in batch]


if __name__ == "__main__":
    sys.exit(main())
