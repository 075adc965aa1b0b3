"""A linear layer whose weight is of int8 with one scale per output channel: a pass reads half the bytes of bfloat16.

Products of few rows on a CPU are those of few_rows.cpp, which widens the weight on the way. For others a block of the
weight at a time is widened for torch's product, and no whole copy is kept.

Shapes: N output channels, K input channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.kernels import few_rows

LARGEST = 127
BLOCK = 2**20  # elements of a weight that are in floating point at a time
# torch's products wait for a block to be widened, so ours are ahead of them for more rows.
MAX_ROWS = {dtype: max(most, 32) for dtype, most in few_rows.MAX_ROWS.items()}


class Int8Linear(nn.Linear):
    """rows (…, K) → rows by the transpose of weight · scale, plus the bias: (…, N) like rows.

    weight (N, K) int8, not trained; scale (N,), kept in float32; bias (N,) or None. Gradients reach the rows.
    """

    few_rows_inside = True  # see few_rows.few_row_layers
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("scale", scale.float())

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """A layer in floating point, each channel rounded to multiples of its largest weight / 127. ValueError for
        weights that are not finite."""
        source = linear.weight
        weight = torch.empty(source.shape, dtype=torch.int8, device=source.device)
        scale = torch.empty(len(source), dtype=torch.float32, device=source.device)
        for part in _blocks(source):
            values = source[part].to(torch.float32, copy=True)
            largest = values.abs().amax(1)
            if not largest.isfinite().all():
                raise ValueError(f"a weight {tuple(source.shape)} has NaN or infinity; int8 takes finite numbers alone")
            scale[part] = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
            weight[part] = values.div_(scale[part, None]).round_()
        layer = cls(weight, scale, linear.bias)
        return layer.train(linear.training)

    def forward(self, rows: Tensor) -> Tensor:
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        learns = torch.is_grad_enabled() and (rows.requires_grad or (self.bias is not None and self.bias.requires_grad))
        few = rows.dtype in MAX_ROWS and rows.numel() <= MAX_ROWS[rows.dtype] * self.in_features
        if few and kind == "cpu" and not learns and _has_kernel():
            return few_rows.OURS.few_rows.default(rows, self.weight, self.bias, None, self.scale)
        out: Tensor = _Product.apply(rows, self.weight, self.scale)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def dense_weight(self) -> Tensor:
        """The weight (N, K) that the layer applies, in float32."""
        return self.weight.float().mul_(self.scale[:, None])

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Linear:
        """Moved and cast like other modules, but for the scale's dtype."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight=int8"


def applied_weight(linear: Any) -> Tensor:
    """The weight (N, K) in floating point that a linear layer applies: its own, or that of an Int8Linear."""
    weight: Tensor = linear.dense_weight() if isinstance(linear, Int8Linear) else linear.weight
    return weight


def _has_kernel() -> bool:
    """In a graph only where it is compiled inside of a block of ours, which has loaded the operations."""
    return few_rows.is_active() or (not torch.compiler.is_compiling() and few_rows.available())


def _blocks(weight: Tensor) -> Iterator[slice]:
    step = max(BLOCK // max(weight.shape[1], 1), 1)
    return (slice(first, first + step) for first in range(0, len(weight), step))


class _Product(torch.autograd.Function):
    """rows (…, K) by the transpose of weight · scale, which gradients go back through block by block as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        out = rows.new_empty(*rows.shape[:-1], len(weight))
        for part in _blocks(weight):
            out[..., part] = F.linear(rows, weight[part].to(rows.dtype)) * scale[part]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        total = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1], dtype=torch.float32)
        for part in _blocks(weight):
            total += (gradient[..., part] * scale[part]).to(gradient.dtype) @ weight[part].to(gradient.dtype)
        return total.to(gradient.dtype), None, None
