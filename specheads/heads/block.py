"""The one decoder block of all heads that have one: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Shapes: B batch rows, T positions, H hidden, d head size, S unrolled steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.target.cache import TreeCache
from specheads.decoding.target.hf_base import decoder_of, text_config
from specheads.heads.rope import rotate


class Block(nn.Module):
    """One decoder layer whose attention may read a wider input than its residual stream."""

    def __init__(
        self, *, hidden_size: int, input_size: int, intermediate_size: int, num_heads: int, num_key_value_heads: int,
        head_dim: int, rms_norm_eps: float, attention_bias: bool = False, mlp_bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        wide, narrow = num_heads * head_dim, num_key_value_heads * head_dim
        self.q_proj = nn.Linear(input_size, wide, bias=attention_bias)
        self.k_proj = nn.Linear(input_size, narrow, bias=attention_bias)
        self.v_proj = nn.Linear(input_size, narrow, bias=attention_bias)
        self.o_proj = nn.Linear(wide, hidden_size, bias=attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=mlp_bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=mlp_bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=mlp_bias)

    def qkv(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, input) → q (B, heads, T, d), k and v (B, kv heads, T, d), rotated."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        return rotate(q, *rotary), rotate(k, *rotary), v

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output (B, heads, T, d) and residual (B, T, H) → the block's output (B, T, H)."""
        hidden = residual + self.o_proj(attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def cached(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: TreeCache,
        layer: int,
        mask: Tensor | None,
    ) -> Tensor:
        """One pass over the head's own KV cache. mask None is causal over the pass itself (a prompt)."""
        q, k, v = self.qkv(x, rotary)
        keys, values = cache.update(k, v, layer)
        # enable_gqa has no fast kernel under a mask on every device; repeating one layer's heads costs little.
        group = self.num_heads // self.num_key_value_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.finish(attended, residual)

    def unrolled(
        self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor,
        keys: tuple[Tensor, ...] = (), values: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One step of training-time test: query i sees step 0's keys 0 … i under mask (B, 1, T, T), and of each later
        step only its own. keys and values: of the steps before, each (B, heads, T, d). Returns the output (B, T, H) and
        the step's own key and value. EAGLE-3, arXiv:2503.01840."""
        q, k, v = self.qkv(x, rotary)
        group = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        first_key, *later_keys = *keys, k
        first_value, *later_values = *values, v
        if not later_keys:
            return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), residual), k, v
        scale = self.head_dim**-0.5
        past = q @ first_key.transpose(-1, -2) * scale + mask
        own = torch.stack([(q * key).sum(-1) * scale for key in later_keys], -1)  # (B, heads, T, s)
        weights = torch.cat([past, own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        attended = weights[..., : past.shape[-1]] @ first_value
        for s, value in enumerate(later_values):
            attended = attended + weights[..., past.shape[-1] + s].unsqueeze(-1) * value
        return self.finish(attended, residual), k, v


def decoder_layers(base: Any) -> nn.ModuleList | None:
    """The base's stack of decoder layers: the first list of so many modules in its text decoder."""
    count = text_config(base).num_hidden_layers
    return next((m for m in decoder_of(base).modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


def copy_layer(block: Block, layer: nn.Module) -> None:
    """Start a block from a decoder layer of the base: each matrix whose name and shape agree, and the norm."""
    source: dict[str, tuple[str, Tensor]] = {
        ".".join(name.split(".")[-2:]): (name, p) for name, p in layer.named_parameters() if p.ndim == 2
    }
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    copied = False
    for name, own in block.named_parameters():
        if name not in source:
            continue
        path, stored = source[name]
        quantised = not stored.is_floating_point()
        given = dense_weight(layer.get_submodule(path.rpartition(".")[0]), dtype) if quantised else stored
        if given is None or given.is_meta or given.shape != own.shape:
            continue
        with torch.no_grad():
            own.copy_(given)
        copied = True
    if copied:
        copy_norm(block.post_attention_layernorm, getattr(layer, "post_attention_layernorm", None))


def copy_norm(norm: nn.RMSNorm, source: nn.Module | None) -> None:
    """Start an RMSNorm from one of the base's, whatever it keeps its scale as (Gemma's is one less than it says)."""
    weight = getattr(source, "weight", None)
    if source is None or "RMSNorm" not in type(source).__name__ or weight is None or weight.shape != norm.weight.shape:
        return
    if not weight.is_meta:
        with torch.no_grad():
            norm.weight.copy_(source(torch.ones_like(weight)))  # the scale is what ones come out as


def final_norm(base: Any) -> nn.Module | None:
    """The norm behind the base's last layer, under the names models give it."""
    names = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
    return next((norm for name in names if (norm := getattr(decoder_of(base), name, None)) is not None), None)


@torch.no_grad()
def dense_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """The weights (out, in) that a linear layer applies, whatever it keeps them as; None for another layer."""
    size, weight = getattr(linear, "in_features", None), getattr(linear, "weight", None)
    if size is None or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    out = linear(torch.eye(size, device=weight.device, dtype=dtype))  # the identity comes out as the weights
    bias = getattr(linear, "bias", None)
    return (out if bias is None else out - bias).T
