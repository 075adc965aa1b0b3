"""Counts rows that nothing can be learnt from, by reason, with the first of each."""

from __future__ import annotations

from collections import Counter

from specheads.data.row_forms import RowError


class Dropped:
    """Rows left out. str() says how many for which reason, and the number and fault of the first with each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reason: str, number: int, fault: str = "") -> None:
        """number: of the row, from 1."""
        self.counts[reason] += 1
        self._first.setdefault(reason, f"row {number}" + (f": {fault}" if fault else ""))

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        return "; ".join(
            f"{count:,} {reason} (the first is {self._first[reason]})" for reason, count in self.counts.most_common()
        )


def reason_of(error: ValueError) -> str:
    """The kind of fault of a row, by which it is counted."""
    return error.reason if isinstance(error, RowError) else RowError.reason
