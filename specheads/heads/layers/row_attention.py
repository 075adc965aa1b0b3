"""Attention over the keys of a training row that keeps no weights, so that its memory is linear in the row's length.

Queries attend to the row's keys, under a mask that is made for a part of the queries at a time, and to a few keys of
their own: the drafts before them, or the slots of their block. Both are one softmax. The backward pass computes each
part's weights again from the log-sum-exp of its scores, as FlashAttention-2 does (arXiv:2307.08691).

Shapes: B batch rows, T positions and keys of a row, N queries, C queries of a part, E key heads, g query heads that
share one, M queries that share keys of their own, S keys of their own, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.verify.masks import Reach

# Scores of a part, over all rows and heads: what fits into a CPU's cache, or a small share of a GPU's memory.
SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
FEWEST = 32  # queries of a part, however long the row: fewer waste matrix products


@dataclass(frozen=True, slots=True)
class RowMask:
    """Which keys of its row a query attends to: those of its document up to its own column, within reach.

    documents, positions (B, T): of the row. columns (B, N): of the queries; None: one at each key. ahead: how far a
    query's position, which the reach counts from, is after that of its column: of all, or (N,) of each. keys (B, T)
    bool: those that may be attended to; None: all.
    """

    documents: Tensor
    positions: Tensor
    reach: Reach
    columns: Tensor | None = None
    ahead: int | Tensor = 0
    keys: Tensor | None = None

    def part(self, queries: slice, keys: slice | None = None) -> Tensor:
        """(B, C, K) bool: of these queries over these keys; None: over the first, which are all that they see."""
        every = torch.arange(self.documents.shape[1], device=self.documents.device)
        if self.columns is None:
            columns = every[queries].expand(len(self.documents), -1)
            keys = slice(queries.stop) if keys is None else keys
        else:
            columns, keys = self.columns[:, queries], slice(None) if keys is None else keys
        seen = self.documents.gather(1, columns).unsqueeze(2) == self.documents[:, keys].unsqueeze(1)
        seen &= every[keys] <= columns.unsqueeze(2)
        if self.reach.kind != "full":
            ahead = self.ahead[queries] if isinstance(self.ahead, Tensor) else self.ahead
            position = self.positions.gather(1, columns) + ahead
            seen &= self.reach(position.unsqueeze(2), self.positions[:, keys].unsqueeze(1))
        if self.keys is not None:
            seen &= self.keys[:, keys].unsqueeze(1)
        return seen

    def attended(self, parts: Sequence[slice]) -> list[slice]:
        """For each part of the queries, the keys from the first to the last that one of them attends to, or the first
        key where there is none. A window, or a document, leaves out most of a long row's."""
        ends = []
        for queries in parts:
            seen = self.part(queries).flatten(0, 1).any(0)
            after = len(seen) - seen.flip(0).int().argmax()
            ends.append(torch.stack([seen.int().argmax(), after.where(seen.any(), 1)]))
        return [slice(*both) for both in torch.stack(ends).tolist()] if ends else []  # one wait for the device


def row_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: RowMask, *,
    shared: int = 1, own_mask: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """query (B, E · g, N, d); keys and values: the row's (B, E, T, d) first, then any number of (B, E, N, d), which
    `shared` neighbouring queries have as keys of their own → (B, E · g, N, d).

    own_mask (1 or B, N, S) bool, S = shared · (len(keys) − 1); None: a query attends to all of its own. scale: None for
    d ** −0.5.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, keys, values = query.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.unflatten(1, (keys[0].shape[1], -1))
    size = queries_of_part(query.shape[0] * query.shape[1], keys[0].shape[2], query.device)
    size = -(-size // shared) * shared
    parts = [slice(start, min(start + size, query.shape[2])) for start in range(0, query.shape[2], size)]
    options = (mask, list(zip(parts, mask.attended(parts), strict=True)), shared, own_mask, scale, len(keys))
    return _RowAttention.apply(options, grouped, *keys, *values).flatten(1, 2)


def queries_of_part(heads: int, length: int, device: torch.device) -> int:
    """How many queries attend at a time, of `heads` heads (of all rows) over `length` keys."""
    return max(FEWEST, SCORES.get(device.type, SCORES["cuda"]) // (heads * length))


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], query: Tensor, *keys_values: Tensor) -> Tensor:
        """query (B, E, g, N, d) → (B, E, g, N, d)."""
        count = options[-1]
        keys, values = keys_values[:count], keys_values[count:]
        out = query.new_empty(*query.shape[:-1], values[0].shape[-1])
        total = at_least_float32(query.new_empty(0)).new_empty(*query.shape[:-1], 1)  # log-sum-exp
        for part in _parts(options, query, keys):
            highest = part.scores.amax(-1, keepdim=True)
            if part.own is not None:
                highest = torch.maximum(highest, part.own.amax(-1, keepdim=True))
            weights = part.scores.sub_(highest).exp_()
            weight = weights.sum(-1, keepdim=True)
            attended = part.over_row(weights.to(query.dtype), values[0])
            if part.own is not None:
                weights = part.own.sub_(highest).exp_()
                weight = weight + weights.sum(-1, keepdim=True)
                attended = attended + part.over_own(weights.to(query.dtype), part.own_of(values))
            out[..., part.queries, :] = attended / weight
            total[..., part.queries, :] = weight.log_().add_(highest)
        ctx.options = options
        ctx.save_for_backward(query, out, total, *keys_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        query, out, total, *keys_values = ctx.saved_tensors
        count = ctx.options[-1]
        keys, values, scale = keys_values[:count], keys_values[count:], ctx.options[-2]
        grads = [torch.empty_like(query), *(torch.empty_like(t) for t in keys_values)]
        # The row's own are sums over parts, the others are not.
        grads[1], grads[1 + count] = (at_least_float32(torch.zeros_like(t)) for t in (keys[0], values[0]))
        for part in _parts(ctx.options, query, keys):
            here, given = part.queries, upstream[..., part.queries, :]
            mean = at_least_float32(given * out[..., here, :]).sum(-1, keepdim=True)
            weights = part.scores.sub_(total[..., here, :]).exp_()
            change = at_least_float32(part.over_row(given, values[0], transpose=True))
            change = change.sub_(mean).mul_(weights).mul_(scale).to(query.dtype)
            grad = part.over_row(change, keys[0])
            grads[1][:, :, part.keys] += part.to_row(change, query[..., here, :])
            grads[1 + count][:, :, part.keys] += part.to_row(weights.to(query.dtype), given)
            if part.own is not None:
                weights = part.own.sub_(total[..., here, :]).exp_()
                change = at_least_float32(part.over_own(given, part.own_of(values), transpose=True))
                change = change.sub_(mean).mul_(weights).mul_(scale).to(query.dtype)
                grad = grad + part.over_own(change, part.own_of(keys))
                part.to_own(change, query[..., here, :], grads[2 : 1 + count])
                part.to_own(weights.to(query.dtype), given, grads[2 + count :])
            grads[0][..., here, :] = grad
        return None, *(grad.to(t.dtype) for grad, t in zip(grads, (query, *keys_values), strict=True))


@dataclass(slots=True)
class _Part:
    """A part of the queries, and the K keys of the row from the first to the last that one of them attends to. scores
    (B, E, g, C, K) over these; own (B, E, g, C, S) over the queries' own."""

    queries: slice
    shared: int
    keys: slice
    scores: Tensor
    own: Tensor | None = None

    def over_row(self, left: Tensor, row: Tensor, transpose: bool = False) -> Tensor:
        """left (B, E, g, C, …) times the row's keys or values, transposed or not → (B, E, g, C, …)."""
        row = row[:, :, self.keys]
        return (left.flatten(2, 3) @ (row.mT if transpose else row)).unflatten(2, left.shape[2:4])

    def to_row(self, left: Tensor, right: Tensor) -> Tensor:
        """(B, E, g, C, K) transposed, times (B, E, g, C, d) → (B, E, K, d)."""
        return left.flatten(2, 3).mT @ right.flatten(2, 3)

    def own_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The queries' own keys or values (B, E, C / M, S, d)."""
        return torch.cat([t[:, :, self.queries].unflatten(2, (-1, self.shared)) for t in tensors[1:]], 3)

    def over_own(self, left: Tensor, own: Tensor, transpose: bool = False) -> Tensor:
        """The same as `over_row` over the queries' own keys or values (B, E, C / M, S, d)."""
        product = self._by_group(left) @ (own.mT if transpose else own)
        return product.unflatten(3, (-1, self.shared)).transpose(2, 3).flatten(3, 4)

    def to_own(self, left: Tensor, right: Tensor, into: Sequence[Tensor]) -> None:
        """Write (B, E, g, C, S) transposed, times (B, E, g, C, d), into tensors (B, E, N, d)."""
        product = self._by_group(left).mT @ self._by_group(right)
        for each, grad in zip(into, product.split(self.shared, 3), strict=True):
            each[:, :, self.queries] = grad.flatten(2, 3)

    def _by_group(self, x: Tensor) -> Tensor:
        """(B, E, g, C, …) → (B, E, C / M, g · M, …)."""
        return x.unflatten(3, (-1, self.shared)).transpose(2, 3).flatten(3, 4)


def _parts(options: tuple[Any, ...], query: Tensor, keys: Sequence[Tensor]) -> Iterator[_Part]:
    mask, parts, shared, own_mask, scale, count = options
    for queries, near in parts:
        seen, here = mask.part(queries, near), query[..., queries, :]
        part = _Part(queries, shared, near, query)
        part.scores = at_least_float32(part.over_row(here, keys[0], transpose=True)).mul_(scale)
        lowest = torch.finfo(part.scores.dtype).min
        part.scores.masked_fill_(~seen[:, None, None], lowest)
        if count > 1:
            part.own = at_least_float32(part.over_own(here, part.own_of(keys), transpose=True)).mul_(scale)
            if own_mask is not None:
                part.own.masked_fill_(~own_mask[:, None, None, queries], lowest)
        yield part
