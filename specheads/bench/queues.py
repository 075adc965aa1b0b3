"""Runs a decoder on more prompts than its batch has rows, batch after batch, without refilling rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specheads.bench.runner import Decoder, Output, Stopwatch

COUNTS = ("gained", "rows_stepped", "steps")


def batch_by_batch(decode: Decoder, size: int) -> Decoder:
    """A decoder that runs `decode` on `size` rows at a time. Its output and time are those of all batches together."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        if len(batch["input_ids"]) <= size:
            return decode(batch, watch)
        return join_outputs([decode(part, None) for part in split(batch, size)])

    return run


def split(batch: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Parts of `size` rows (the last may have fewer), each without columns that are padding in all its rows."""
    for start in range(0, len(batch["input_ids"]), size):
        part = {name: values[start : start + size] for name, values in batch.items()}
        real = part["attention_mask"].bool().any(0)
        for name in ("input_ids", "attention_mask"):
            part[name] = part[name][:, real]
        yield part


def join_outputs(outputs: Sequence[Output]) -> Output:
    """Several outputs joined into one, without what any of them does not report."""
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
