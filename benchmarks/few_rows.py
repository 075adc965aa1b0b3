"""What the matrix products of a pass over few tokens take: as the library makes them, and as a compiled step does.

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py --out docs/benchmarks

All matrices of a model's linear layers in turn, random float32, each side in one compiled graph, interleaved; the
median of the rounds counts. "Read" sums the matrices once. "Small" has the matrices of the shipped base (39.6 MB),
"large" those of two layers of hidden size 2,048 (239 MB).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch._dynamo import reset
from torch.nn import functional

from specheads.bench import environment, report
from specheads.decoding.compiled.few_rows import FewRows


def layers(count: int, hidden: int, inner: int, groups: int, vocab: int) -> list[tuple[int, int]]:
    """Shapes (out, in) of the matrices of a Llama whose keys and values are hidden / groups wide."""
    layer = [(hidden, hidden)] * 2 + [(hidden // groups, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return layer * count + [(vocab, hidden)]


MODELS = {"small": layers(12, 256, 704, 2, 4096), "large": layers(2, 2048, 2816, 4, 2048)}


def products(rows: dict[int, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return [functional.linear(rows[weight.shape[1]], weight) for weight in weights]


def sides(rows: dict[int, Tensor], weights: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed. torch traces each side anew."""
    reset()
    options = {"post_grad_custom_pre_pass": FewRows()}
    library = torch.compile(lambda rows, weights: products(rows, weights), dynamic=False)
    specheads = torch.compile(lambda rows, weights: products(rows, weights), dynamic=False, options=options)
    return {
        "library": lambda: library(rows, weights),
        "specheads": lambda: specheads(rows, weights),
        "read": lambda: [weight.sum() for weight in weights],
    }


def milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for few_rows.md and .json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 6, 8, 11, 16, 24, 32])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()

    found: list[dict[str, object]] = []
    for model, shapes in MODELS.items():
        weights = [torch.randn(shape) for shape in shapes]
        for count in options.rows:
            rows = {width: torch.randn(count, width) for width in {shape[1] for shape in shapes}}
            timed = sides(rows, weights)
            for function in timed.values():  # compiled and read once
                function()
            times = [{name: milliseconds(function) for name, function in timed.items()} for _ in range(options.rounds)]
            gains = [one["library"] / one["specheads"] for one in times]
            low, high = sorted(gains)[len(gains) // 4], sorted(gains)[-1 - len(gains) // 4]
            found.append(
                {"model": model, "rows": count, **{name: median(one[name] for one in times) for name in timed}}
                | {"gain": median(gains), "low": low, "high": high}
            )
            print(found[-1], flush=True)

    where = environment.environment()
    command = f"python benchmarks/few_rows.py --rounds {options.rounds} --out {options.out}"
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} {command}"
    lines = [
        "# Matrix products over few rows", "",
        f"{__doc__.split(chr(10) * 2)[-1].strip()}".replace("\n", " "), "",
        "Milliseconds; library over specheads: the median of the rounds, and its middle half.", "",
        "| model | rows | read | library | specheads | library over specheads |", "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {r['model']} | {r['rows']} | {r['read']:.1f} | {r['library']:.1f} | {r['specheads']:.1f} | "
            f"{r['gain']:.2f} ({r['low']:.2f}–{r['high']:.2f}) |"
            for r in found
        ),
        "", f"`{command}`", "", environment.line(where), "",
    ]  # fmt: skip
    report.write(
        options.out, "few_rows", "\n".join(lines), {"command": command, "environment": where, "products": found}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
