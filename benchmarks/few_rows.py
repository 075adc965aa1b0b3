"""What the matrix products and the attention of a pass over few tokens take: as the library makes them, and as a
compiled step does.

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py --out docs/benchmarks

Random numbers, each side in one compiled graph, interleaved; the median of the rounds counts.

Products: all matrices of a model's linear layers in turn. "Read" sums the matrices once. "Small" has the matrices of
the shipped base (39.6 MB in float32), "large" those of two layers of hidden size 2,048 (239 MB). Of bfloat16
only the rows that are ours.

Attention, in float32: twelve layers of 2 heads of width 64, as the shipped base has, of 1 or 16 texts; rows are the
tokens of a text times the heads that share its keys. They may attend to the first half of the keys, as while a text is
shorter than its cache, or to all. "Read" sums keys and values once.
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
from torch._dynamo import reset
from torch.nn import functional

from specheads.bench import environment, report
from specheads.decoding.compiled.few_rows import MOST_ROWS, FewRows


def layers(count: int, hidden: int, inner: int, groups: int, vocab: int) -> list[tuple[int, int]]:
    """Shapes (out, in) of the matrices of a Llama whose keys and values are hidden / groups wide."""
    layer = [(hidden, hidden)] * 2 + [(hidden // groups, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return layer * count + [(vocab, hidden)]


MODELS = {"small": layers(12, 256, 704, 2, 4096), "large": layers(2, 2048, 2816, 4, 2048)}


def products(rows: dict[int, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return [functional.linear(rows[weight.shape[1]], weight) for weight in weights]


def attention(queries: Tensor, caches: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> list[Tensor]:
    return [functional.scaled_dot_product_attention(queries, key, value, mask) for key, value in caches]


def sides(function: Callable[..., object], *inputs: object, read: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """The functions to time, by name. torch traces each one anew."""
    reset()
    options: dict[str, Any] = {"post_grad_custom_pre_pass": FewRows()}
    library = torch.compile(lambda *inputs: function(*inputs), dynamic=False)
    specheads = torch.compile(lambda *inputs: function(*inputs), dynamic=False, options=options)
    return {
        "library": lambda: library(*inputs),
        "specheads": lambda: specheads(*inputs),
        "read": lambda: [tensor.sum() for tensor in read],
    }


def milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def timed(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each side, and the ratio of the library's to ours: medians and quartiles."""
    for function in sides.values():  # compiled and read once
        function()
    times = [{name: milliseconds(function) for name, function in sides.items()} for _ in range(rounds)]
    gains = sorted(one["library"] / one["specheads"] for one in times)
    low, high = gains[len(gains) // 4], gains[-1 - len(gains) // 4]
    medians = {name: median(one[name] for one in times) for name in sides}
    return medians | {"gain": median(gains), "low": low, "high": high}


def time_products(rows: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    for (model, shapes), dtype in itertools.product(MODELS.items(), MOST_ROWS):
        weights = [torch.randn(shape).to(dtype) for shape in shapes]
        for count in rows:
            if dtype == torch.float32 or count <= MOST_ROWS[dtype]:
                inputs = {width: torch.randn(count, width).to(dtype) for width in {shape[1] for shape in shapes}}
                case = {"model": model, "dtype": str(dtype).removeprefix("torch."), "rows": count}
                yield case | timed(sides(products, inputs, weights, read=weights), rounds)


def time_attention(rounds: int) -> Iterator[dict[str, Any]]:
    heads, width = 2, 64
    for texts in (1, 16):
        for keys in (256, 1024):
            caches = [tuple(torch.randn(texts, heads, keys, width) for _ in range(2)) for _ in range(12)]
            read = [tensor for cache in caches for tensor in cache]
            for allowed, rows in itertools.product((keys // 2, keys), (1, 4, 8, 16)):
                mask = torch.full((texts, 1, rows, keys), torch.finfo(torch.float32).min)
                mask[..., :allowed] = 0
                inputs = torch.randn(texts, heads, rows, width), caches, mask
                case = {"texts": texts, "keys": keys, "allowed": allowed, "rows": rows}
                yield case | timed(sides(attention, *inputs, read=read), rounds)


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
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    found = {
        "products": noted(time_products(options.rows, options.rounds)),
        "attention": noted(time_attention(options.rounds)),
    }

    where = environment.environment()
    rows = " ".join(map(str, options.rows))
    command = f"python benchmarks/few_rows.py --rows {rows} --rounds {options.rounds} --out {options.out}"
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} {command}"
    _, _, how, about_products, about_attention = [" ".join(part.split()) for part in str(__doc__).split("\n\n")]
    lines = [
        "# Matrix products and attention over few rows", "",
        f"{how} Milliseconds; library over specheads: the median of the rounds, and its middle half.", "",
        about_products, "", *table(found["products"], ["model", "dtype", "rows"]), "",
        about_attention, "", *table(found["attention"], ["texts", "keys", "allowed", "rows"]), "",
        f"`{command}`", "", environment.line(where), "",
    ]  # fmt: skip
    report.write(options.out, "few_rows", "\n".join(lines), {"command": command, "environment": where} | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
