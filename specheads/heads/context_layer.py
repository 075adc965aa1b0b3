"""A decoder layer whose queries read a context beside themselves: keys and values of both by the same matrices.

As Qwen3's layers otherwise: norms on the input and on queries and keys. The layer of DFlash, arXiv:2602.06036.
Shapes: B batch rows, T positions, K slots of a block, H hidden, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from specheads.heads.block import Block
from specheads.heads.rope import rotate


class ContextLayer(Block):
    """The context enters as it is, without the input norm."""

    def __init__(self, *, hidden_size: int, head_dim: int, rms_norm_eps: float, **sizes: Any) -> None:
        super().__init__(
            hidden_size=hidden_size, input_size=hidden_size, head_dim=head_dim, rms_norm_eps=rms_norm_eps, **sizes
        )
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)
        self.q_norm = nn.RMSNorm(head_dim, eps=rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T, H), a context or a block's normed input → keys and values (B, kv heads, T, d)."""
        k, v = (p(x).unflatten(2, (self.num_key_value_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k).transpose(1, 2), *rotary), v.transpose(1, 2)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """(B, K, H) → (B, K, H). attend: the block's own keys and values → all that there are, and the mask."""
        x = self.input_layernorm(hidden)
        q = self.q_norm(self.q_proj(x).unflatten(2, (self.num_heads, self.head_dim))).transpose(1, 2)
        keys, values, mask = attend(*self.keys_values(x, rotary))
        group = self.num_heads // self.num_key_value_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return self.finish(F.scaled_dot_product_attention(rotate(q, *rotary), keys, values, attn_mask=mask), hidden)
