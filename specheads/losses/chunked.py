"""A sum over many rows, computed chunk by chunk, so that only one chunk's activations are in memory at a time.

Shapes: R rows, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

Add = Callable[[Tensor], None]
Compute = Callable[..., tuple[Tensor, ...]]
Cut = tuple[slice, list[slice]]  # the rows of a chunk, and the slice of each tensor that belongs to them


def rows_of_chunk(width: int, device: torch.device) -> int:
    """How many rows of logits over `width` tokens to compute at a time.

    Few enough to fit into a CPU's cache or a small share of a GPU's memory, but enough that accumulating the gradient
    of the output matrix, once per chunk, does not take most of the time.
    """
    return max(256, (1 << 22) // width) if device.type == "cpu" else max(512, (1 << 26) // width)


def chunked_sum(
    compute: Compute, tensors: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int,
    row_indices: Sequence[Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(Σ of all that compute(add, rows, *chunks) adds, what it returns, concatenated along the first dimension).

    tensors: at least one, each (R, …), cut into chunks of C rows; `rows` is the slice of a chunk.
    row_indices: if tensors after the first leave rows out, the indices of the rows they have: (R_i,), ascending, one
      tensor for each after the first.
    compute: calls add() with scalars that are differentiable in its chunks and in `parameters`, and returns a tuple of
      tensors without gradients. add() computes the scalar's gradients and frees its activations, so two scalars must
      not share activations.

    The backward pass only scales these gradients, so it can run once. Linear + loss in chunks: Liger Kernel,
    arXiv:2410.10989.
    """
    cuts = _cuts(tensors, chunk, row_indices)
    if is_deepspeed_zero3_enabled():
        return _checkpointed_sum(compute, tensors, cuts)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    total, *rest = _ChunkedSum.apply(compute, cuts, len(tensors), needs_grad, *tensors, *parameters)
    return total, tuple(rest)


def _cuts(tensors: Sequence[Tensor], chunk: int, row_indices: Sequence[Tensor] | None) -> list[Cut]:
    rows = len(tensors[0])
    edges = [*range(0, rows, chunk), rows] if rows else [0, 0]
    edges_of_each = [edges] * len(tensors)
    if row_indices:
        bounds = torch.tensor(edges, device=tensors[0].device)
        edges_of_each = [edges, *torch.stack([torch.searchsorted(indices, bounds) for indices in row_indices]).tolist()]
    return [
        (slice(start, end), [slice(*each[i : i + 2]) for each in edges_of_each])
        for i, (start, end) in enumerate(pairwise(edges))
    ]


def _concatenate(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _checkpointed_sum(
    compute: Compute, tensors: Sequence[Tensor], cuts: list[Cut]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same sum under ZeRO-3: each chunk is recomputed in the backward pass, where parameters are gathered again. A
    process with fewer chunks than others computes empty ones."""

    def sum_chunk(*args: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        values: list[Tensor] = []
        rest = compute(values.append, *args)
        return torch.stack(values).sum(), rest

    ends = [len(t) for t in tensors]
    empty = (slice(ends[0], ends[0]), [slice(end, end) for end in ends])
    cuts = cuts + [empty] * (calls_of_all(len(cuts), tensors[0].device) - len(cuts))
    results = [
        checkpoint(sum_chunk, rows, *(t[part] for t, part in zip(tensors, parts, strict=True)), use_reentrant=False)
        for rows, parts in cuts
    ]
    return sum((total for total, _ in results[1:]), results[0][0]), _concatenate([rest for _, rest in results])


def calls_of_all(count: int, device: torch.device) -> int:
    """How often a process must call a module that its own data needs `count` times.

    Under ZeRO-3 every process must call it equally often, since each call gathers the parameters from all processes.
    """
    if not is_deepspeed_zero3_enabled() or not torch.distributed.is_initialized():
        return count
    counts = torch.tensor(count, device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    return int(counts)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, cuts: list[Cut], count: int, needs_grad: bool, *inputs: Tensor) -> Any:
        tensors, parameters = inputs[:count], inputs[count:]
        needed = [needs_grad and t.requires_grad for t in inputs]
        tensor_grads = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
        # Float32, because a sum in half precision would be rounded at every chunk.
        parameter_grads = [
            torch.zeros_like(p, dtype=torch.float32 if p.element_size() < 4 else p.dtype) if need else None
            for p, need in zip(parameters, needed[count:], strict=True)
        ]
        values, rest = [], []
        for rows, cut in cuts:
            parts = [t[part].detach().requires_grad_(n) for t, part, n in zip(tensors, cut, needed, strict=False)]
            sources = [t for t, need in zip((*parts, *parameters), needed, strict=True) if need]
            sums = [grad[part] for grad, part in zip(tensor_grads, cut, strict=True) if grad is not None]
            sums += [grad for grad in parameter_grads if grad is not None]

            def add(value: Tensor, sources: list[Tensor] = sources, sums: list[Tensor] = sums) -> None:
                values.append(value.detach())
                if value.requires_grad:
                    grads = torch.autograd.grad(value, sources, allow_unused=True)
                    for accumulated, grad in zip(sums, grads, strict=True):
                        if grad is not None:
                            accumulated += grad

            with torch.set_grad_enabled(needs_grad):
                rest.append(tuple(t.detach() for t in compute(add, rows, *parts)))
        results = _concatenate(rest)
        ctx.mark_non_differentiable(*results)
        ctx.grads = [
            None if grad is None else grad.to(source.dtype)
            for grad, source in zip((*tensor_grads, *parameter_grads), inputs, strict=True)
        ]
        return torch.stack(values).sum(), *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *(None if g is None else g.mul_(upstream) for g in grads)
