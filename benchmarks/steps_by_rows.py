"""What a step of a real model takes, by the rows of its pass or with a head's drafts, and how often the plain step fits
into it: with torch's products, with ours of few rows, with int8 weights; uncompiled and compiled.

    OMP_NUM_THREADS=1 python benchmarks/steps_by_rows.py coder-0.5b --rows 1 2 4 6 8 16 32
    OMP_NUM_THREADS=1 python benchmarks/steps_by_rows.py coder-0.5b --head my/eagle3 --compile

After a text of random tokens. --rows: chains of fixed tokens, of which drafting costs nothing; one row is plain
decoding. --head: the whole step with drafts of this head, beside plain decoding. All kinds of step take turns, a text
of each a round; CPU milliseconds of a step of specheads.generate(), which other programs change less than the time
that passes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
from bootstrap import median_interval
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import specheads
from specheads import DraftTree, chain
from specheads.bench import environment, report
from specheads.decoding.drafters.base import Context, Drafter
from specheads.options import shown

STEPS, FIRST = 12, 3  # the first steps of a text are left out
NEW_TOKENS = 128  # more than these steps gain, so that no draft is shortened
PLAIN = "plain"


class FixedChain(Drafter):
    """Drafts so many tokens, the same at each step."""

    layers = ()

    def __init__(self, depth: int) -> None:
        self.tokens = [17 + i for i in range(depth)]

    def propose(self, context: Context, sampler: Any, plan: Any) -> DraftTree:
        return DraftTree.chains(context.root, [self.tokens] * len(context.root))


class Clock(BaseStreamer, StoppingCriteria):
    """The CPU time after each step of a text, which it ends after STEPS of them."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(process_time())

    def end(self) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), len(self.stamps) > STEPS, device=input_ids.device)

    def milliseconds(self) -> list[float]:
        return [1e3 * (after - before) for before, after in pairwise(self.stamps[FIRST:])]


@dataclass(frozen=True)
class Side:
    """One way to run steps."""

    name: str
    base: Any
    drafters: dict[str, tuple[Any, Any]]  # by the step's name: drafter and tree
    kernels: bool
    compile: bool

    def step_milliseconds(self, step: str, ids: torch.Tensor) -> list[float]:
        drafter, tree = self.drafters[step]
        clock = Clock()
        specheads.generate(
            self.base, ids, draft=drafter, tree=tree, max_new_tokens=NEW_TOKENS, eos_token_id=None, do_sample=False,
            kernels=self.kernels, compile=self.compile, streamer=clock, stopping_criteria=[clock],
        )  # fmt: skip
        return clock.milliseconds()


def drafters_of(base: Any, head: str | None, trees: list[str], rows: list[int]) -> dict[str, tuple[Any, Any]]:
    """By the name of each kind of step, its drafter and tree, plain decoding first."""
    found: dict[str, tuple[Any, Any]] = {PLAIN: (False, None)}
    found |= {f"{count} rows": (FixedChain(count - 1), chain(count - 1)) for count in rows if count > 1}
    if head is not None:
        model = specheads.SpecModel.from_pretrained(head, base=base)
        found |= {tree: (model.head, tree) for tree in trees}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a model, by folder or hub id")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="of a pass over fixed tokens")
    parser.add_argument("--head", help="the folder of a trained head")
    parser.add_argument("--trees", nargs="+", default=["chain:5", "chain:7", "static:16"], help="of the head")
    parser.add_argument("--sides", nargs="+", default=["torch", "ours"], choices=["torch", "ours", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=200, help="tokens of the text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="compiled steps too, which all are compared with")
    options = parser.parse_args()
    if "ours" not in options.sides:
        parser.error(f"--sides {shown(options.sides)}: name ours too, whose plain step is the measure")
    sides = []
    for name in options.sides:
        quantised = {"quantization_config": specheads.Int8Config()} if name == "int8" else {}
        dtype = getattr(torch, options.dtype)
        base = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype, **quantised).eval()
        drafters = drafters_of(base, options.head, options.trees, options.rows)
        sides += [Side(name, base, drafters, name != "torch", compile) for compile in {False, options.compile}]
    ids = torch.randint(1000, 2000, (1, options.context), generator=torch.Generator().manual_seed(0))
    kinds = [(step, side) for step in sides[0].drafters for side in sides]
    times: list[list[list[float]]] = [[] for _ in kinds]  # of each kind, the steps of each round
    for turn in range(options.rounds + 1):  # the first builds and compiles
        for (step, side), taken in zip(kinds, times, strict=True):
            steps = side.step_milliseconds(step, ids)
            if turn:
                taken.append(steps)
    measure = next(
        taken for (step, side), taken in zip(kinds, times, strict=True)
        if step == PLAIN and side.name == "ours" and side.compile == options.compile
    )  # fmt: skip
    table = []
    for (step, side), taken in zip(kinds, times, strict=True):
        low, middle, high = quantiles([one for steps in taken for one in steps], n=4)
        ratios = [median(steps) / median(plain) for steps, plain in zip(taken, measure, strict=True)]
        ends = median_interval(ratios)
        ratio = f"{median(ratios):.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")
        way = f"{side.name}, compiled" if side.compile else side.name
        table.append((step, way, f"{middle:.0f} ({low:.0f}–{high:.0f})", ratio))
    over = "over ours, plain" + (", compiled" if options.compile else "")
    print(report.markdown(("step", "products", "CPU ms (middle half)", f"{over} (95 %)"), table))
    print(environment.line(environment.environment()))


if __name__ == "__main__":
    main()
