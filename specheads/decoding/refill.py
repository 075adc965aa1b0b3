"""Replacing the finished rows of a batch by new prompts, between two steps.

Shapes: B batch rows, R of them refilled, T prompt columns, P positions of a context, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.decoding.drafters.base import Context


@dataclass(frozen=True)
class NewRows:
    """Prompts that replace the batch rows `rows`: ids (R, T), packed left, of lengths (R,).

    limits: the most new tokens of each. seeds: one each, if anything is random.
    """

    rows: list[int]
    ids: Tensor
    lengths: Tensor
    limits: list[int]
    seeds: list[int] | None = None


# Finished rows → the prompts that replace some of them; None if no prompt is left.
Refill = Callable[[list[int]], NewRows | None]


def only_last_position(context: Context) -> Context:
    """The context of prompts that have been read up to their last position."""
    return replace(
        context,
        features=context.newest(context.features).unsqueeze(1),
        following=context.root.unsqueeze(1),
        new=torch.ones_like(context.new),
        last=torch.zeros_like(context.last),
    )


def split_prompt(context: Context, columns: int) -> tuple[Context, Context]:
    """Split the context of prompts: all but each row's last position, and the last alone, padded to `columns`."""
    others = replace(context, new=context.new - 1, last=(context.last - 1).clamp(min=0))
    last = only_last_position(context)
    features, following = (_pad_columns(values, columns) for values in (last.features, last.following))
    return others, replace(last, features=features, following=following)


def replace_rows(context: Context, rows: Sequence[int], prompts: Context) -> Context:
    """The context with `rows` replaced by the rows of `prompts`; its history changes in place."""
    for row, ids in zip(rows, prompts.history, strict=True):
        context.history[row] = ids
    index = context.root.new_tensor(rows)

    def merge(values: Tensor, new: Tensor) -> Tensor:
        """(B, P, …) and (R, T, …) → (B, the longer of both, …)."""
        width = max(values.shape[1], new.shape[1])
        values, new = (_pad_columns(each, width) for each in (values, new))
        return values.index_copy(0, index.to(values.device), new.to(values.device))

    return replace(
        context,
        root=context.root.index_copy(0, index, prompts.root),
        features=merge(context.features, prompts.features),
        following=merge(context.following, prompts.following),
        new=context.new.index_copy(0, index, prompts.new),
        last=context.last.index_copy(0, index, prompts.last),
        bound=max(map(len, context.history)) - 1,
        top=None if context.top is None or prompts.top is None else merge(context.top, prompts.top),
    )


def _pad_columns(values: Tensor, width: int) -> Tensor:
    """(B, P, …) → (B, width, …), with zeros, which nothing reads."""
    return F.pad(values, [0, 0] * (values.dim() - 2) + [0, width - values.shape[1]])
