"""What the matrix products and the attention of a pass over few tokens take: as the library makes them, and as ours.

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py --out docs/benchmarks

Random numbers, the sides interleaved; the median of the rounds counts.

Products: all matrices of a model's linear layers in turn, by each of the processor's instructions that we have products
for; "int8": bfloat16 rows by weights of int8, beside the library's product with those in bfloat16. "Read" sums the
matrices once. "Small" has the matrices of the shipped base (39.6 MB in float32), "large" those of
two layers of hidden size 2,048 (239 MB), "real" 24 matrices of 4,864 × 896 (418 MB), one a layer of Qwen2.5-0.5B.

Attention: twelve layers of 2 heads of width 64, of 1 or 16 texts; rows are the tokens of a text times the heads that
share its keys. They may attend to the first half of the keys, as while a text is shorter than its cache, or to all.
"Read" sums keys and values once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specheads.bench import environment, report
from specheads.decoding.kernels.few_rows import MAX_QUERIES, OURS, load


def layers(count: int, hidden: int, inner: int, groups: int, vocab: int) -> list[tuple[int, int]]:
    """Shapes (out, in) of the matrices of a Llama whose keys and values are hidden / groups wide."""
    layer = [(hidden, hidden)] * 2 + [(hidden // groups, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return layer * count + [(vocab, hidden)]


MODELS = {
    "small": layers(12, 256, 704, 2, 4096),
    "large": layers(2, 2048, 2816, 4, 2048),
    "real": [(4864, 896)] * 24,
}


def milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def timed(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each side, and the ratio of the library's to ours: medians and quartiles."""
    for function in sides.values():  # read once
        function()
    times = [{name: milliseconds(function) for name, function in sides.items()} for _ in range(rounds)]
    gains = sorted(one["library"] / one["specheads"] for one in times)
    low, high = gains[len(gains) // 4], gains[-1 - len(gains) // 4]
    medians = {name: median(one[name] for one in times) for name in sides}
    return medians | {"gain": median(gains), "low": low, "high": high}


Sides = dict[str, Callable[[], object]]


def product_sides(rows: dict[int, Tensor], weights: Sequence[Tensor], ours: Sequence[Tensor], by: str) -> Sides:
    """weights: the library's; ours: the same, or in int8."""
    scales = [torch.ones(len(weight)) if weight.dtype == torch.int8 else None for weight in ours]
    pairs = [*zip(ours, scales, strict=True)]
    return {
        "library": lambda: [functional.linear(rows[weight.shape[1]], weight) for weight in weights],
        "specheads": lambda: [OURS.few_rows(rows[weight.shape[1]], weight, None, by, scale) for weight, scale in pairs],
        "read": lambda: [
            (weight.view(torch.bfloat16) if weight.dtype == torch.int8 else weight).sum() for weight in ours
        ],
    }


def attention_sides(query: Tensor, caches: Sequence[Sequence[Tensor]], mask: Tensor) -> Sides:
    scale, last = query.shape[3] ** -0.5, query.shape[2]
    return {
        "library": lambda: [functional.scaled_dot_product_attention(query, *cache, mask) for cache in caches],
        "specheads": lambda: [OURS.attention_of_few_rows(query, *cache, mask, scale, last) for cache in caches],
        "read": lambda: [tensor.sum() for cache in caches for tensor in cache],
    }


def time_products(models: Sequence[str], rows: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    instructions = {
        torch.float32: ["float32"], torch.bfloat16: OURS.instructions(), torch.int8: OURS.instructions(int8=True),
    }  # fmt: skip
    for model, (kind, known) in itertools.product(models, instructions.items()):
        dtype = torch.bfloat16 if kind == torch.int8 else kind
        weights = [torch.randn(shape).to(dtype) for shape in MODELS[model]]
        ours = [(30 * weight).clamp(-127, 127).to(kind) for weight in weights] if kind == torch.int8 else weights
        for by, count in itertools.product(known, rows):
            inputs = {width: torch.randn(count, width).to(dtype) for width in {shape[1] for shape in MODELS[model]}}
            case = {"model": model, "dtype": str(kind).removeprefix("torch."), "by": by, "rows": count}
            yield case | timed(product_sides(inputs, weights, ours, by), rounds)


def time_attention(rounds: int) -> Iterator[dict[str, Any]]:
    heads, width = 2, 64
    for dtype, texts, keys in itertools.product(MAX_QUERIES, (1, 16), (256, 1024)):
        caches = [[torch.randn(texts, heads, keys, width).to(dtype) for _ in range(2)] for _ in range(12)]
        for allowed, rows in itertools.product((keys // 2, keys), (1, 4, 8, 16, 48, 112)):
            mask = torch.full((texts, 1, rows, keys), torch.finfo(dtype).min, dtype=dtype)
            mask[..., :allowed] = 0
            query = torch.randn(texts, heads, rows, width).to(dtype)
            case = {"dtype": str(dtype).removeprefix("torch."), "texts": texts, "keys": keys, "allowed": allowed}
            yield case | {"rows": rows} | timed(attention_sides(query, caches, mask), rounds)


def table(found: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """A Markdown table of what was timed (columns `names`) and its figures."""
    columns = [*names, "read", "library", "specheads", "library over specheads"]
    lines = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    for row in found:
        figures = [f"{row[name]:.2f}" for name in ("read", "library", "specheads")]
        gain = f"{row['gain']:.2f} ({row['low']:.2f}–{row['high']:.2f})"
        lines.append(f"| {' | '.join([*(str(row[name]) for name in names), *figures, gain])} |")
    return lines


def noted(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All results as a list; each is printed when it arrives."""
    rows = []
    for row in found:
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for few_rows.md and .json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 6, 8, 11, 16, 24, 32, 48, 64])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    load()
    found = {
        "products": noted(time_products(options.models, options.rows, options.rounds)),
        "attention": noted(time_attention(options.rounds)),
    }

    where = environment.environment()
    rows = " ".join(map(str, options.rows))
    models = " ".join(options.models)
    command = f"python benchmarks/few_rows.py --models {models} --rows {rows} --rounds {options.rounds}"
    command += f" --out {options.out}"
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} {command}"
    _, _, how, about_products, about_attention = [" ".join(part.split()) for part in str(__doc__).split("\n\n")]
    lines = [
        "# Matrix products and attention over few rows", "",
        f"{how} Milliseconds; library over specheads: the median of the rounds, and its middle half.", "",
        about_products, "", *table(found["products"], ["model", "dtype", "by", "rows"]), "",
        about_attention, "", *table(found["attention"], ["dtype", "texts", "keys", "allowed", "rows"]), "",
        f"`{command}`", "", environment.line(where), "",
    ]  # fmt: skip
    report.write(options.out, "few_rows", "\n".join(lines), {"command": command, "environment": where} | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
