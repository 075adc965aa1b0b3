"""What a step of a real model takes by the rows of its pass: with torch's products, ours of few rows, and int8 weights.

    OMP_NUM_THREADS=1 python benchmarks/steps_by_rows.py coder-0.5b
    OMP_NUM_THREADS=1 python benchmarks/steps_by_rows.py coder-0.5b --rows 1 6 --compile

The rows are a chain of fixed tokens after a text of random ones, so drafting costs nothing; one row is plain decoding,
of which only a whole text is timed. The sides take turns; CPU
milliseconds of a step of specheads.generate(), which other programs change less than the time that passes.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import specheads
from specheads import DraftTree, chain
from specheads.bench import environment
from specheads.decoding.drafters.base import Context, Drafter

STEPS, FIRST = 12, 3  # the first steps of a text are left out


class FixedChain(Drafter):
    """Drafts so many tokens, the same at each step; stamps: the CPU time at which it is asked."""

    layers = ()

    def __init__(self, depth: int) -> None:
        self.tokens = [17 + i for i in range(depth)]
        self.stamps: list[float] = []

    def propose(self, context: Context, sampler: Any, plan: Any) -> DraftTree:
        self.stamps.append(process_time())
        return DraftTree.chains(context.root, [self.tokens] * len(context.root))


def step_milliseconds(base: Any, ids: torch.Tensor, rows: int, kernels: bool, compile: bool) -> list[float]:
    """CPU milliseconds of the steps of one text, whose passes have so many rows."""
    if rows == 1:
        return [plain_milliseconds(base, ids, kernels, compile)]
    drafter = FixedChain(rows - 1)
    specheads.generate(
        base, ids, draft=drafter, tree=chain(rows - 1), max_new_tokens=STEPS + rows, eos_token_id=None,
        do_sample=False, kernels=kernels, compile=compile,
    )  # fmt: skip
    stamps = drafter.stamps[FIRST:STEPS]
    return [1e3 * (after - before) for before, after in pairwise(stamps)]


def plain_milliseconds(base: Any, ids: torch.Tensor, kernels: bool, compile: bool) -> float:
    """CPU milliseconds of a step without drafts: of a text less those of its prompt and first step."""
    taken = []
    for length in (1, STEPS):
        began = process_time()
        specheads.generate(
            base, ids, draft=False, max_new_tokens=length, eos_token_id=None, do_sample=False, kernels=kernels,
            compile=compile,
        )  # fmt: skip
        taken.append(process_time() - began)
    return 1e3 * (taken[1] - taken[0]) / (STEPS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a model, by folder or hub id")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=200, help="tokens of the text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype).eval()
    narrow = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype, quantization_config=specheads.Int8Config())
    sides = {"torch": (base, False), "ours": (base, True), "int8": (narrow, True)}
    ids = torch.randint(1000, 2000, (1, options.context), generator=torch.Generator().manual_seed(0))
    times: dict[tuple[int, str], list[float]] = {(rows, side): [] for rows in options.rows for side in sides}
    for turn in range(options.rounds + 1):  # the first builds and compiles
        for (rows, side), taken in times.items():
            model, kernels = sides[side]
            steps = step_milliseconds(model, ids, rows, kernels, options.compile)
            taken += steps if turn else []
    print("| rows | torch | ours (middle half) | int8 (middle half) |\n|---:|---:|---:|---:|")
    for rows in options.rows:
        ours, narrow_ones = (quantiles(times[rows, side], n=4) for side in ("ours", "int8"))
        shown = (f"{middle:.0f} ({low:.0f}–{high:.0f})" for low, middle, high in (ours, narrow_ones))
        print(f"| {rows} | {median(times[rows, 'torch']):.0f} | {' | '.join(shown)} |")
    print(environment.line(environment.environment()))


if __name__ == "__main__":
    main()
