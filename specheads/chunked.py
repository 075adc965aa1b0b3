"""Sums over many rows whose activations never stand in memory together: forward and gradients a chunk at a time.

Shapes: R rows, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

Steps = Generator[Tensor, None, tuple[Tensor, ...]]
Compute = Callable[..., Steps]


def chunked_sum(
    compute: Compute, tensors: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Σ of all that compute(rows, *chunks) yields, and what it returns, joined along the first dimension.

    tensors: at least one, each (R, …), cut into chunks of C rows; rows is the slice they were cut from. compute yields
    scalars, differentiable in its chunks and in `parameters`, and returns a tuple of tensors that carry no gradient.
    The gradients of a scalar are taken, and its activations let go, before compute goes on to the next, so two of them
    share none; the backward pass only scales them: it can run once. Linear + loss in chunks: Liger Kernel,
    arXiv:2410.10989.
    """
    if is_deepspeed_zero3_enabled():
        return _recomputed(compute, tensors, chunk)
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    total, *rest = _Chunked.apply(compute, chunk, len(tensors), wanted, *tensors, *parameters)
    return total, tuple(rest)


def _slices(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk)]


def _each(steps: Steps, take: Callable[[Tensor], None]) -> tuple[Tensor, ...]:
    """Gives all that is yielded to `take`: → what is returned."""
    while True:
        try:
            value = next(steps)
        except StopIteration as end:
            returned: tuple[Tensor, ...] = end.value
            return returned
        take(value)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _recomputed(compute: Compute, tensors: Sequence[Tensor], chunk: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same with each chunk computed again in the backward pass, where ZeRO-3 has its parameters whole once more.
    A process with fewer rows than others takes empty chunks."""

    def summed(*given: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        values: list[Tensor] = []
        rest = _each(compute(*given), values.append)
        return torch.stack(values).sum(), rest

    rows = len(tensors[0])
    slices = _slices(rows, chunk)
    slices += [slice(rows, rows)] * (calls_of_all(len(slices), tensors[0].device) - len(slices))
    done = [checkpoint(summed, here, *(t[here] for t in tensors), use_reentrant=False) for here in slices]
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
        of_rows = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
        # Half-precision sums of many chunks would round once a chunk.
        summed = [
            torch.zeros_like(p, dtype=torch.float32 if p.element_size() < 4 else p.dtype) if need else None
            for p, need in zip(parameters, needed[count:], strict=True)
        ]
        values, rest = [], []
        for rows in _slices(len(tensors[0]), chunk):
            parts = [t[rows].detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=False)]
            sources = [t for t, need in zip((*parts, *parameters), needed, strict=True) if need]
            sums = [whole[rows] for whole in of_rows if whole is not None] + [s for s in summed if s is not None]

            def take(value: Tensor, sources: list[Tensor] = sources, sums: list[Tensor] = sums) -> None:
                values.append(value.detach())
                if value.requires_grad:
                    grads = torch.autograd.grad(value, sources, allow_unused=True)
                    for accumulated, grad in zip(sums, grads, strict=True):
                        if grad is not None:
                            accumulated += grad

            with torch.set_grad_enabled(wanted):
                rest.append(tuple(t.detach() for t in _each(compute(rows, *parts), take)))
        joined = _joined(rest)
        ctx.mark_non_differentiable(*joined)
        ctx.grads = [
            None if grad is None else grad.to(source.dtype)
            for grad, source in zip((*of_rows, *summed), inputs, strict=True)
        ]
        return torch.stack(values).sum(), *joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *(None if g is None else g.mul_(upstream) for g in grads)
