"""DFlash 2's convolution over the slots of a block, around each sublayer of a parallel head's blocks.

u is a sublayer's normed input, c a channel, g the group of channels that it belongs to, i a slot of its block:
  [δ_in, δ_out] = P u
  conv(x, b, δ)[i, c] = Σ_tap (b[tap, c] + δ[i, tap, g]) · x[i − tap, c], with zeros before the block's first slot
  block output = residual + conv(sublayer(conv(u, b_in, δ_in)), b_out, δ_out)
Only slots are convolved; the context's keys and values are not. At the start b[0] = 1 and all else is 0, which changes
nothing. Dao-style depthwise, without an activation. As in z-lab/dflash, SpecForge, speculators 0.9 and SGLang 0.5.23.

Shapes: B batch rows, M slots of several blocks, H hidden, K taps, G groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.heads.layers.block import AttendSlots, ContextBlock


class SlotConvolution(nn.Module):
    """The convolutions before and after one sublayer. base_kernel (2, K, H): b_in and b_out."""

    def __init__(self, hidden_size: int, block_size: int, taps: int, group: int) -> None:
        super().__init__()
        self.block_size, self.group = block_size, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Normed input u (B, M, H) → the sublayer's input (B, M, H), and the convolution of its output."""
        change = self.kernel_projection(x).unflatten(2, (2, self.base_kernel.shape[1], -1))
        before, after = (
            (base + delta.repeat_interleave(self.group, -1)).to(x.dtype)  # (B, M, K, H)
            for base, delta in zip(self.base_kernel, change.unbind(2), strict=True)
        )
        return self.convolve(before, x), partial(self.convolve, after)

    def convolve(self, kernel: Tensor, x: Tensor) -> Tensor:
        """kernel (B, M, K, H), x (B, M, H) → (B, M, H). M: slots of whole blocks, or the first of a single one."""
        size = min(x.shape[1], self.block_size) or 1
        blocks = x.unflatten(1, (x.shape[1] // size, size))
        result = kernel[:, :, 0] * x
        for tap in range(1, min(kernel.shape[2], size)):
            earlier = F.pad(blocks[:, :, :-tap], (0, 0, tap, 0)).flatten(1, 2)
            result = result + kernel[:, :, tap] * earlier
        return result


class ConvolvedBlock(ContextBlock):
    """A `ContextBlock` with a convolution around its attention and one around its MLP."""

    def __init__(self, *, block_size: int, taps: int, group: int, hidden_size: int, **sizes: Any) -> None:
        super().__init__(hidden_size=hidden_size, **sizes)
        self.attention_conv, self.mlp_conv = (SlotConvolution(hidden_size, block_size, taps, group) for _ in range(2))

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: AttendSlots) -> Tensor:
        x, convolve = self.attention_conv(self.input_layernorm(hidden))
        hidden = hidden + convolve(self.merge(self.attention(x, rotary, attend)))
        x, convolve = self.mlp_conv(self.post_attention_layernorm(hidden))
        return hidden + convolve(self.mlp(x))
