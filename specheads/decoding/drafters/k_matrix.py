"""The k-matrix of a cascade: who writes how many tokens for whom.

Row r is a reviewer (0 the target, else draft r − 1), column c a draft, largest first. A reviewer's tokens are written
by its columns in turn, each until as many are there as the row says up to it: lower bounds, since a draft's last
contribution may overshoot. Cascade Speculative Drafting, arXiv:2312.11462.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KMatrix = tuple[tuple[int, ...], ...]
NOTATIONS = ("incremental", "paper")


def k_matrix_of(given: Any, names: Sequence[str], notation: str = "incremental") -> KMatrix:
    """A square of whole numbers (lists or a tensor), one row and column a draft → incremental rows.

    notation="paper": each row counts on, from the diagonal: k₁₁, k₁₂ = k₁₁ + the next … names: of the drafts, for the
    errors. ValueError for what is no such matrix, and for one by which a draft or a reviewer would have nothing to do.
    """
    if notation not in NOTATIONS:
        raise ValueError(f"notation={notation!r} of a k-matrix must be one of {', '.join(map(repr, NOTATIONS))}")
    size, rows = len(names), _rows(given)
    if [len(row) for row in rows] != [size] * size:
        shape = f"rows of {', '.join(str(len(row)) for row in rows) or 'nothing'}"
        raise ValueError(
            f"the k-matrix has {shape}, but {size} drafts need {size} × {size}: a row for each reviewer (the target, "
            "then every draft but the last) and a column for each draft"
        )
    for r, row in enumerate(rows):
        for c, k in enumerate(row):
            where = f"k_matrix[{r}][{c}]={k!r}"
            if not isinstance(k, int) or isinstance(k, bool) or k < 0:
                raise ValueError(f"{where} must be a number of tokens, 0 or more")
            if c < r and k:
                raise ValueError(f"{where} must be 0: a k-matrix is upper triangular, as no draft writes for a smaller")
    if notation == "paper":
        rows = [_increments(r, row) for r, row in enumerate(rows)]
    for r, row in enumerate(rows):
        if not any(row):
            reviewer = "the target" if r == 0 else f"draft {r - 1} ({names[r - 1]})"
            raise ValueError(f"row {r} of the k-matrix is zero: {reviewer} would have nothing to review")
    for c, name in enumerate(names):
        if not any(row[c] for row in rows):
            raise ValueError(
                f"column {c} of the k-matrix is zero: draft {c} ({name}) would draft nothing; leave it out"
            )
    return tuple(map(tuple, rows))


def most_written(k_matrix: KMatrix, runs: Sequence[int | None], reviewer: int = 0) -> int:
    """The most tokens a reviewer's drafts write, overshoot included. runs: of each draft that copies whole runs, the
    ids of one run; None for those that review, and add a token of their own to what they let stand."""
    wanted = most = 0
    for column in range(reviewer, len(runs)):
        k, run = k_matrix[reviewer][column], runs[column]
        wanted += k
        if not k:
            continue
        if run is None:
            most = max(most, wanted + most_written(k_matrix, runs, column + 1))
        elif column == reviewer:
            most = -(-wanted // run) * run  # whole runs from the first token on
        else:
            most = max(most, wanted - 1 + run)
    return most


def _rows(given: Any) -> list[list[Any]]:
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        return [list(row) for row in listed]
    except TypeError as error:
        raise ValueError(f"a k-matrix is a list of rows, such as [[13, 10], [0, 10]], not {given!r}") from error


def _increments(r: int, row: list[int]) -> list[int]:
    for c in range(r + 1, len(row)):
        if row[c] < row[c - 1]:
            raise ValueError(
                f"row {r} of the k-matrix, {row}, falls, but in the paper's notation it counts on; give "
                "notation='incremental' for a row of each draft's own share"
            )
    return [0] * r + [k - (row[c] if c >= r else 0) for c, k in enumerate(row[r:], start=r - 1)]
