"""The peak memory and time of a loss over a large vocabulary, computed in one piece and in chunks.

    python benchmarks/chunked_loss.py --out docs/benchmarks

Inputs: hidden states and output matrix of draft and target. Outputs: loss and gradients. Peak memory, beyond the
inputs, is counted over every tensor created (8,192 rows × 131,072 tokens, on meta tensors, so no machine is too small).
Time is for 1,024 rows × 32,768 tokens, hidden size 256, as medians of interleaved repeats; the chunks are those that
training uses on the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from live_memory import LiveMemory
from torch import Tensor

from specheads.bench import environment, report
from specheads.losses.chunked import Add, chunked_sum, rows_of_chunk
from specheads.losses.functions import DISTRIBUTION_LOSSES

ROWS, VOCAB, HIDDEN = 8192, 131_072, 256


def loss_of(name: str, given: list[Tensor], chunk: int | None) -> Tensor:
    hidden, weight, target_hidden, target_weight = given

    def loss(here: slice, part: Tensor) -> Tensor:
        log_p = (target_hidden[here] @ target_weight.T).log_softmax(-1)
        return DISTRIBUTION_LOSSES[name]((part @ weight.T).log_softmax(-1), log_p).sum()

    def compute(add: Add, here: slice, part: Tensor) -> tuple[Tensor, ...]:
        add(loss(here, part))
        return ()

    if chunk is None:
        return loss(slice(None), hidden)
    return chunked_sum(compute, [hidden], [weight], chunk)[0]


def tensors(rows: int, vocab: int, device: str) -> list[Tensor]:
    shapes = ((rows, HIDDEN), (vocab, HIDDEN), (rows, HIDDEN), (vocab, HIDDEN))
    return [torch.randn(shape, device=device).requires_grad_(i < 2) for i, shape in enumerate(shapes)]


def peak(name: str, chunk: int | None) -> int:
    given = tensors(ROWS, VOCAB, "meta")
    with LiveMemory() as memory:
        loss_of(name, given, chunk).backward()
    return memory.peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for chunked_loss.md and .json")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = tensors(1024, 32_768, device)
    rows: dict[str, dict[str, Any]] = {}
    for name in DISTRIBUTION_LOSSES:
        times: dict[str, list[float]] = {"whole": [], "chunked": []}
        for _ in range(options.repeats):
            for form, chunk in (("whole", None), ("chunked", rows_of_chunk(2 * 32_768, torch.device(device)))):
                began = time.process_time() if device == "cpu" else time.perf_counter()
                loss_of(name, given, chunk).backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                times[form].append((time.process_time() if device == "cpu" else time.perf_counter()) - began)
        whole = peak(name, None)
        rows[name] = {
            "whole_gib": whole / 2**30,
            **{
                f"gib_{kind}": peak(name, rows_of_chunk(2 * VOCAB, torch.device(kind))) / 2**30
                for kind in ("cuda", "cpu")
            },
            "time_ratio": median(c / w for c, w in zip(times["chunked"], times["whole"], strict=True)),
        }
        print(name, rows[name])
    where = environment.environment()
    command = f"python benchmarks/chunked_loss.py --repeats {options.repeats} --out {options.out}"
    lines = [
        "# Losses over a large vocabulary, whole and in chunks", "",
        f"{ROWS:,} rows × {VOCAB:,} tokens, hidden size {HIDDEN}, float32: peak GiB beyond the inputs, gradients "
        "included. Time: that of the chunks over that of the whole, 1,024 rows × 32,768 tokens.", "",
        "| loss | whole | chunks of a GPU | less | chunks of a CPU | less | time |", "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {r['whole_gib']:.1f} | {r['gib_cuda']:.2f} | {r['whole_gib'] / r['gib_cuda']:.1f} × | "
            f"{r['gib_cpu']:.2f} | {r['whole_gib'] / r['gib_cpu']:.1f} × | {r['time_ratio']:.2f} × |"
            for name, r in rows.items()
        ),
        "", f"`{command}`", "", environment.line(where), "",
    ]  # fmt: skip
    report.write(
        options.out, "chunked_loss", "\n".join(lines), {"command": command, "environment": where, "losses": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
