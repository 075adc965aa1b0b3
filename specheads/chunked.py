"""Sums over many rows whose activations never stand in memory together: forward and gradients a chunk at a time.

Shapes: R rows, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

Compute = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def chunked_sum(
    compute: Compute, tensors: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Σ over chunks of compute(rows, *chunks)[0], and the rest of what it returns, joined along the first dimension.

    tensors: at least one, each (R, …), cut into chunks of C rows; rows is the slice they were cut from. compute gives
    a scalar, differentiable in its chunks and in `parameters`, and a tuple of tensors that carry no gradient.
    Gradients are taken as each chunk is done, so the graph holds none of its activations, and the backward pass only
    scales them: it can run once. Linear + loss in chunks: Liger Kernel, arXiv:2410.10989.
    """
    if is_deepspeed_zero3_enabled():
        return _recomputed(compute, tensors, chunk)
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    total, *rest = _Chunked.apply(compute, chunk, len(tensors), wanted, *tensors, *parameters)
    return total, tuple(rest)


def _slices(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk)]


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _recomputed(compute: Compute, tensors: Sequence[Tensor], chunk: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same with each chunk computed again in the backward pass, where ZeRO-3 has its parameters whole once more.
    A process with fewer rows than others takes empty chunks."""
    rows = len(tensors[0])
    slices = _slices(rows, chunk)
    slices += [slice(rows, rows)] * (calls_of_all(len(slices), tensors[0].device) - len(slices))
    done = [checkpoint(compute, here, *(t[here] for t in tensors), use_reentrant=False) for here in slices]
    return sum((total for total, _ in done[1:]), done[0][0]), _joined([rest for _, rest in done])


def calls_of_all(count: int, device: torch.device) -> int:
    """How often a process calls a module that its own data call `count` times: under ZeRO-3 as often as any other,
    since parameters are gathered at each call, on all processes together."""
    if not is_deepspeed_zero3_enabled() or not torch.distributed.is_initialized():
        return count
    counts = torch.tensor(count, device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    return int(counts)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, chunk: int, count: int, wanted: bool, *inputs: Tensor) -> Any:
        tensors, parameters = inputs[:count], inputs[count:]
        needed = [wanted and t.requires_grad for t in inputs]
        of_rows = [torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
        # Half-precision sums of many chunks would round once a chunk.
        summed = [
            torch.zeros_like(p, dtype=torch.float32 if p.element_size() < 4 else p.dtype) if need else None
            for p, need in zip(parameters, needed[count:], strict=True)
        ]
        total, rest = None, []
        for rows in _slices(len(tensors[0]), chunk):
            with torch.set_grad_enabled(wanted):
                parts = [t[rows].detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=False)]
                value, more = compute(rows, *parts)
                if value.requires_grad:
                    sources = [p for p, need in zip((*parts, *parameters), needed, strict=True) if need]
                    grads = iter(torch.autograd.grad(value, sources, allow_unused=True))
                    for whole in of_rows:
                        if whole is not None:
                            grad = next(grads)
                            whole[rows] = 0 if grad is None else grad
                    for accumulated in summed:
                        if accumulated is not None and (grad := next(grads)) is not None:
                            accumulated += grad
                elif wanted:
                    for whole in of_rows:
                        if whole is not None:
                            whole[rows] = 0
            total = value.detach() if total is None else total + value.detach()
            rest.append(tuple(t.detach() for t in more))
        joined = _joined(rest)
        ctx.mark_non_differentiable(*joined)
        ctx.grads = [
            None if grad is None else grad.to(source.dtype)
            for grad, source in zip((*of_rows, *summed), inputs, strict=True)
        ]
        return total, *joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *(None if g is None else g.mul_(upstream) for g in grads)
