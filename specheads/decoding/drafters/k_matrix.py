"""The k-matrix of a cascade: how many tokens each draft writes for each reviewer.

Row r is a reviewer (0 the target, else draft r − 1), column c a draft, largest first. For each reviewer the columns
write in turn, each until the number of tokens reaches the sum of the row up to that column. These are lower bounds,
since a draft's last contribution may overshoot. Cascade Speculative Drafting, arXiv:2312.11462.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KMatrix = tuple[tuple[int, ...], ...]
NOTATIONS = ("incremental", "paper")


def parse_k_matrix(k_matrix: Any, names: Sequence[str], notation: str = "incremental") -> KMatrix:
    """A square matrix of whole numbers (lists or a tensor), a row and a column per draft → incremental rows.

    notation="paper": the entries of a row are cumulative, from the diagonal on. names: of the drafts, for the errors.
    ValueError for anything else, and for a matrix that leaves a draft or a reviewer nothing to do.
    """
    if notation not in NOTATIONS:
        raise ValueError(f"notation={notation!r} of a k-matrix must be one of {', '.join(map(repr, NOTATIONS))}")
    size, rows = len(names), _rows(k_matrix)
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
                raise ValueError(
                    f"{where} must be 0: a k-matrix is upper triangular, because no draft writes for a smaller one"
                )
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


def most_written(k_matrix: KMatrix, path_lengths: Sequence[int | None], reviewer: int = 0) -> int:
    """The most tokens that drafts write for a reviewer, overshoot included.

    path_lengths: ids per path for each draft that writes whole paths; None for drafts that review, and add one token
    after those they accept.
    """
    wanted = most = 0
    for column in range(reviewer, len(path_lengths)):
        k, length = k_matrix[reviewer][column], path_lengths[column]
        wanted += k
        if not k:
            continue
        if length is None:
            most = max(most, wanted + most_written(k_matrix, path_lengths, column + 1))
        elif column == reviewer:
            most = -(-wanted // length) * length  # whole paths from the first token on
        else:
            most = max(most, wanted - 1 + length)
    return most


def _rows(k_matrix: Any) -> list[list[Any]]:
    rows = k_matrix.tolist() if hasattr(k_matrix, "tolist") else k_matrix
    try:
        return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError as error:
        raise ValueError(f"a k-matrix is a list of rows, such as [[13, 10], [0, 10]], not {k_matrix!r}") from error


def _increments(r: int, row: list[int]) -> list[int]:
    for c in range(r + 1, len(row)):
        if row[c] < row[c - 1]:
            raise ValueError(
                f"row {r} of the k-matrix, {row}, decreases, but in the paper's notation rows are cumulative; give "
                "notation='incremental' for rows with each draft's own share"
            )
    return [0] * r + [k - (row[c] if c >= r else 0) for c, k in enumerate(row[r:], start=r - 1)]
