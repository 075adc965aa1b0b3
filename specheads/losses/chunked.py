"""Sums over many rows whose activations never stand in memory together: forward and gradients a chunk at a time.

Shapes: R rows, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

Steps = Generator[Tensor, None, tuple[Tensor, ...]]
Compute = Callable[..., Steps]
Cut = tuple[slice, list[slice]]  # the rows of a chunk, and what each tensor has of them


def chunked_sum(
    compute: Compute, tensors: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int,
    of: Sequence[Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Σ of all that compute(rows, *chunks) yields, and what it returns, joined along the first dimension.

    tensors: at least one, each (R, …), cut into chunks of C rows; rows is the slice they were cut from. Where some rows
    of a tensor are left out, of: for each tensor behind the first the row that each of its own stands for, (R_i,),
    ascending. compute yields scalars, differentiable in its chunks and in `parameters`, and returns a tuple of tensors
    that carry no gradient. The gradients of a scalar are taken, and its activations let go, before compute goes on to
    the next, so two of them share none; the backward pass only scales them: it can run once. Linear + loss in chunks:
    Liger Kernel, arXiv:2410.10989.
    """
    cuts = _cuts(tensors, chunk, of)
    if is_deepspeed_zero3_enabled():
        return _recomputed(compute, tensors, cuts)
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    total, *rest = _Chunked.apply(compute, cuts, len(tensors), wanted, *tensors, *parameters)
    return total, tuple(rest)


def _cuts(tensors: Sequence[Tensor], chunk: int, of: Sequence[Tensor] | None) -> list[Cut]:
    rows = len(tensors[0])
    edges = [*range(0, rows, chunk), rows] if rows else [0, 0]
    ends = [edges] * len(tensors)
    if of:
        at = torch.tensor(edges, device=tensors[0].device)
        ends = [edges, *torch.stack([torch.searchsorted(places, at) for places in of]).tolist()]
    slices = [[slice(start, end) for start, end in pairwise(each)] for each in ends]
    return list(zip(slices[0], map(list, zip(*slices, strict=True)), strict=True))


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


def _recomputed(compute: Compute, tensors: Sequence[Tensor], cuts: list[Cut]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same with each chunk computed again in the backward pass, where ZeRO-3 has its parameters whole once more.
    A process with fewer rows than others takes empty chunks."""

    def summed(*given: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        values: list[Tensor] = []
        rest = _each(compute(*given), values.append)
        return torch.stack(values).sum(), rest

    ends = [len(t) for t in tensors]
    none = (slice(ends[0], ends[0]), [slice(end, end) for end in ends])
    cuts = cuts + [none] * (calls_of_all(len(cuts), tensors[0].device) - len(cuts))
    done = [
        checkpoint(summed, rows, *(t[own] for t, own in zip(tensors, cut, strict=True)), use_reentrant=False)
        for rows, cut in cuts
    ]
    return sum((total for total, _ in done[1:]), done[0][0]), _joined([rest for _, rest in done])


def calls_of_all(count: int, device: torch.device) -> int:
    """How often a process calls a module that its own data call `count` times: under ZeRO-3 as often as any other,
    since parameters are gathered at each call, on all processes together."""
    if not is_deepspeed_zero3_enabled() or not torch.distributed.is_initialized():
        return count
    counts = torch.tensor(count, device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    return int(counts)


class _Linear(torch.autograd.Function):
    """x Wᵀ + b of x (R, I), whose backward pass adds the gradient of W to `summed` where that lies: a large one that is
    first made by itself costs several times as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, summed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.summed = summed
        return torch._C._nn.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.summed.addmm_(grad.t(), x)
        return grad @ weight, None, None, grad.sum(0) if ctx.needs_input_grad[3] else None


class _SummedInPlace(TorchFunctionMode):
    """Linear layers over the weights of `sums` (id → where its gradient is added up) as `_Linear`, where the types
    agree."""

    def __init__(self, sums: dict[int, Tensor]) -> None:
        super().__init__()
        self.sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._nn.linear and not kwargs and torch.is_grad_enabled():
            x, weight, bias = (*args, None)[:3]
            summed = self.sums.get(id(weight))
            fits = summed is not None and x.ndim == 2 and x.dtype == weight.dtype == summed.dtype
            if fits and x.requires_grad and not torch.is_autocast_enabled(x.device.type):
                return _Linear.apply(x, weight.detach(), summed, bias)
        return func(*args, **kwargs)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, cuts: list[Cut], count: int, wanted: bool, *inputs: Tensor) -> Any:
        tensors, parameters = inputs[:count], inputs[count:]
        needed = [wanted and t.requires_grad for t in inputs]
        of_rows = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
        # Half-precision sums of many chunks would round once a chunk.
        summed = [
            torch.zeros_like(p, dtype=torch.float32 if p.element_size() < 4 else p.dtype) if need else None
            for p, need in zip(parameters, needed[count:], strict=True)
        ]
        in_place = _SummedInPlace({id(p): s for p, s in zip(parameters, summed, strict=True) if s is not None})
        values, rest = [], []
        for rows, cut in cuts:
            parts = [t[own].detach().requires_grad_(n) for t, own, n in zip(tensors, cut, needed, strict=False)]
            sources = [t for t, need in zip((*parts, *parameters), needed, strict=True) if need]
            sums = [whole[own] for whole, own in zip(of_rows, cut, strict=True) if whole is not None]
            sums += [s for s in summed if s is not None]

            def take(value: Tensor, sources: list[Tensor] = sources, sums: list[Tensor] = sums) -> None:
                values.append(value.detach())
                if value.requires_grad:
                    grads = torch.autograd.grad(value, sources, allow_unused=True)
                    for accumulated, grad in zip(sums, grads, strict=True):
                        if grad is not None:
                            accumulated += grad

            with torch.set_grad_enabled(wanted), in_place:
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
