"""A decoder over more prompts than its batch has rows: batch after batch, none refilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specheads.bench.runner import Decoder, Output, Stopwatch

COUNTS = ("gained", "rows_stepped", "steps")


def batch_by_batch(decode: Decoder, size: int) -> Decoder:
    """The decoder, which gets `size` rows at a time. What it gives and how long it takes are those of all batches."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        if len(batch["input_ids"]) <= size:
            return decode(batch, watch)
        return join_outputs([decode(part, None) for part in split(batch, size)])

    return run


def split(batch: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Parts of `size` rows, the last may be smaller, without the columns that are padding in all of them."""
    for start in range(0, len(batch["input_ids"]), size):
        part = {name: values[start : start + size] for name, values in batch.items()}
        real = part["attention_mask"].bool().any(0)
        for name in ("input_ids", "attention_mask"):
            part[name] = part[name][:, real]
        yield part


def join_outputs(outputs: Sequence[Output]) -> Output:
    """One output of several. What one of them does not report is left out."""
    seconds = [output.seconds for output in outputs if output.seconds is not None]
    known = [name for name in COUNTS if all(name in output.statistics for output in outputs)]
    return Output(
        [row for output in outputs for row in output.tokens],
        {name: sum(output.statistics[name] for output in outputs) for name in known},
        [row for output in outputs for row in output.gains] if all(output.gains for output in outputs) else [],
        {part: sum(output.parts.get(part, 0.0) for output in outputs) for part in outputs[0].parts},
        sum(seconds) if len(seconds) == len(outputs) else None,
        [row for output in outputs for row in output.accepted] if all(output.accepted for output in outputs) else [],
    )
