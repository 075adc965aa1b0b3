"""The decoder blocks of heads: how they are initialised from the base, their masks in training, their KV cache.

RMSNorm, RoPE, grouped-query attention, SwiGLU. Shapes: B batch rows, T positions, P new positions, K slots of a
parallel head's block, H hidden, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import Plan
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.grouped_attention import grouped_attention
from specheads.decoding.verify.hf_base import decoder_of
from specheads.decoding.verify.masks import Reach, additive, gather_nodes
from specheads.heads.layers.rope import RotaryTable, rotate
from specheads.heads.layers.row_attention import RowMask, row_attention
from specheads.heads.layers.windows import for_each_block

T = TypeVar("T")
# block, its index, attention input and residual (B, T, H), rotary → output (B, T, H)
Attend = Callable[["DecoderBlock", int, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]
AttendSlots = Callable[[Tensor, Tensor, Tensor], Tensor]  # slots' queries, keys, values → attention output


class RMSNorm(nn.RMSNorm):
    """torch's, computed in the dtype of the scale: given two dtypes, as under autocast, torch warns and takes a slower
    path."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


# Of the MLP's gate, by transformers' names.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}  # fmt: skip


class DecoderBlock(nn.Module):
    """One decoder layer whose attention may read a wider input than its residual stream. qk_norm: Qwen3's norms on each
    head's queries and keys."""

    def __init__(
        self, *, hidden_size: int, input_size: int, intermediate_size: int, num_heads: int, num_key_value_heads: int,
        head_dim: int, rms_norm_eps: float, attention_bias: bool = False, mlp_bias: bool = False,
        hidden_act: str = "silu", qk_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = ACTIVATIONS[hidden_act]
        self.q_norm, self.k_norm = (RMSNorm(head_dim, eps=rms_norm_eps) if qk_norm else nn.Identity() for _ in range(2))
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.add_attention(input_size, hidden_size, attention_bias, rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=rms_norm_eps)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=mlp_bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=mlp_bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=mlp_bias)

    def add_attention(self, input_size: int, hidden_size: int, bias: bool, eps: float) -> None:
        """The layers that attention consists of. eps: of its norms, where it has any."""
        wide, narrow = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, wide, bias=bias)
        self.k_proj = nn.Linear(input_size, narrow, bias=bias)
        self.v_proj = nn.Linear(input_size, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, hidden_size, bias=bias)

    def qkv(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, input) → q (B, heads, T, d), k and v (B, kv heads, T, d), rotated. columns (B, A): compute q only at
        these."""
        asking, turned = x, rotary  # what the queries are made of
        if columns is not None:
            asking = gather_nodes(x, columns)
            turned = tuple(gather_nodes(each.squeeze(1), columns).unsqueeze(1) for each in rotary)  # type: ignore[assignment]
        return self.queries(asking, turned), *self.keys_values(x, rotary)

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, input) → (B, heads, T, d), rotated."""
        q = self.q_proj(x).unflatten(2, (self.num_heads, self.head_dim))
        return rotate(self.q_norm(q).transpose(1, 2), *rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T, input) → keys, rotated, and values (B, kv heads, T, d)."""
        k, v = (p(x).unflatten(2, (self.num_key_value_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k).transpose(1, 2), *rotary), v.transpose(1, 2)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output (B, heads, T, d) and residual (B, T, H) → the block's output (B, T, H)."""
        hidden = residual + self.merge(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def merge(self, attended: Tensor) -> Tensor:
        """Attention output of all heads (B, heads, T, d) → (B, T, H)."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))

    def cached(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: TreeCache,
        layer: int,
        mask: Tensor | None,
    ) -> Tensor:
        """One pass over the head's own KV cache. mask None: the pass is a prompt, causal over itself."""
        q, k, v = self.qkv(x, rotary)
        keys, values = cache.update(k, v, layer)
        if mask is not None:
            return self.finish(grouped_attention(q, keys, values, mask), residual)
        group = self.num_heads // self.num_key_value_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return self.finish(F.scaled_dot_product_attention(q, keys, values, is_causal=True), residual)

    def unrolled(
        self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], mask: RowMask,
        keys: tuple[Tensor, ...] = (), values: tuple[Tensor, ...] = (), columns: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One step of training-time test: query i attends to step 0's keys under the mask, and to key i of each later
        step.

        keys, values: those of the earlier steps, each (B, kv heads, T, d). columns (B, A), of step 0: compute the
        output at these alone. Returns the output (B, T or A, H), and this step's keys and values. EAGLE-3,
        arXiv:2503.01840.
        """
        q, k, v = self.qkv(x, rotary, columns)
        if columns is not None:
            residual, mask = gather_nodes(residual, columns), replace(mask, columns=columns)
        return self.finish(row_attention(q, (*keys, k), (*values, v), mask), residual), k, v


class ContextBlock(DecoderBlock):
    """A decoder block whose queries also attend to a context, whose keys and values come from the same matrices.

    Otherwise like Qwen3's layers: norms on the input, on queries and on keys. The context skips the input norm. The
    layer of DFlash, arXiv:2602.06036.
    """

    def __init__(self, *, hidden_size: int, head_dim: int, rms_norm_eps: float, **sizes: Any) -> None:
        super().__init__(
            hidden_size=hidden_size, input_size=hidden_size, head_dim=head_dim, rms_norm_eps=rms_norm_eps,
            qk_norm=True, **sizes,
        )  # fmt: skip
        self.input_layernorm = RMSNorm(hidden_size, eps=rms_norm_eps)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: AttendSlots) -> Tensor:
        """(B, K, H) → (B, K, H)."""
        return self.finish(self.attention(self.input_layernorm(hidden), rotary, attend), hidden)

    def attention(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: AttendSlots) -> Tensor:
        """Normed slots (B, K, H) → attention output (B, heads, K, d)."""
        return attend(self.queries(x, rotary), *self.keys_values(x, rotary))


def attend_with(cache: TreeCache, masks: Sequence[Tensor | None]) -> Attend:
    """An `Attend` over a head's own cache. masks: of each block; None: causal over the pass itself."""

    def attend(block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return block.cached(x, residual, rotary, cache, i, masks[i])

    return attend


def keep_committed(
    context: Context, scratch: int, hidden: Tensor, num_layers: int, rotary: RotaryTable | None,
    write: Callable[[TreeCache, Tensor, bool], T],
) -> tuple[T, TreeCache]:  # fmt: skip
    """Write the positions committed since the last proposal, hidden (B, P, H), into the head's own cache.

    write(cache, positions (B, P), fresh) adds their keys and values; fresh: the cache is empty. Returns the result of
    write(), and the cache, which is kept in context.memory.
    """
    target, memory = context.target, context.memory
    batch, columns, _ = hidden.shape
    if "cache" in memory:
        cache = memory["cache"]
        return write(cache, cache.append(columns, context.new), False), cache
    cache = memory["cache"] = TreeCache(num_layers, scratch, target.capacity, static=target.static)
    # A row that ends may exceed the limit by one path, and another path of padding is then fed along with other rows.
    if rotary is not None:
        rotary.ensure(target.limit + 2 * scratch, hidden)
    result = write(cache, torch.arange(columns, device=hidden.device).expand(batch, columns), True)
    cache.load_prompt(context.new, columns)
    context.caches.append(cache)
    return result, cache


def read_committed(
    context: Context, plan: Plan, hidden: Tensor, reaches: Sequence[Reach], rotary: RotaryTable,
    run: Callable[[Attend, Tensor], Tensor],
) -> tuple[Tensor, TreeCache]:  # fmt: skip
    """Run the head on the positions committed since the last proposal, hidden (B, P, H). reaches: of each block.

    Returns the result of run(attend, positions (B, P)), and the head's own cache, which now has their keys and values.
    """

    def write(cache: TreeCache, position: Tensor, fresh: bool) -> Tensor:
        query, key = position.unsqueeze(-1), position.unsqueeze(1) if fresh else cache.positions

        def mask(reach: Reach) -> Tensor | None:
            whole = fresh and reach.covers(position.shape[1])
            return None if whole else additive((key <= query) & reach(query, key), hidden.dtype)

        return run(attend_with(cache, for_each_block(reaches, mask)), position)

    return keep_committed(context, max(plan.depth + 1, plan.drafting_slots), hidden, len(reaches), rotary, write)


def copy_layer(block: DecoderBlock, layer: nn.Module) -> None:
    """Copy a decoder layer of the base into a block: each matrix whose name and shape match, and the norm."""
    sources: dict[str, tuple[str, Tensor]] = {
        ".".join(name.split(".")[-2:]): (name, p) for name, p in layer.named_parameters() if p.ndim == 2
    }
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    copied = False
    for name, parameter in block.named_parameters():
        if name not in sources:
            continue
        path, stored = sources[name]
        quantised = not stored.is_floating_point()
        weight = dense_weight(layer.get_submodule(path.rpartition(".")[0]), dtype) if quantised else stored
        if weight is None or weight.is_meta or weight.shape != parameter.shape:
            continue
        with torch.no_grad():
            parameter.copy_(weight)
        copied = True
    if copied:
        copy_norm(block.post_attention_layernorm, getattr(layer, "post_attention_layernorm", None))


def copy_norm(norm: nn.RMSNorm, source: nn.Module | None) -> None:
    """Copy the scale of one of the base's RMSNorms, however it stores it (Gemma stores the scale minus one)."""
    weight = getattr(source, "weight", None)
    if source is None or "RMSNorm" not in type(source).__name__ or weight is None or weight.shape != norm.weight.shape:
        return
    if not weight.is_meta:
        with torch.no_grad():
            norm.weight.copy_(source(torch.ones_like(weight)))  # the norm of ones is the scale


@torch.no_grad()
def soften(norm: nn.Module, base: Any) -> None:
    """Scale a copy of the base's final norm so that a head that starts at random is sure of nothing: the logits of
    random directions get a standard deviation of at most 1.

    With the norm as it is they have 3.6 beside Qwen2.5-Coder-0.5B, and the loss starts at twice that of guessing
    (docs/LOG.md).
    """
    output = base.get_output_embeddings()
    rows = None if output is None else output.weight
    weight = getattr(norm, "weight", None)
    if rows is None or weight is None or rows.is_meta or weight.is_meta or not rows.is_floating_point():
        return
    scale = norm(torch.ones_like(weight)).float()  # some models store it minus one
    some = rows[:: max(1, len(rows) // 4096)].to(weight.device).float()
    if some.shape[-1] == len(scale):
        spread = (some * scale).square().sum(-1).mean().sqrt()
        weight.add_((scale * (1 / spread.clamp_min(1) - 1)).to(weight.dtype))


def final_norm(base: Any) -> nn.Module | None:
    """The norm after the base's last layer, under any of the names that models give it."""
    names = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "embedding_norm")
    return next((norm for name in names if (norm := getattr(decoder_of(base), name, None)) is not None), None)


@torch.no_grad()
def dense_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """The weight (out, in) that a linear layer applies, however it is stored; None for any other kind of layer."""
    size, weight = getattr(linear, "in_features", None), getattr(linear, "weight", None)
    if size is None or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    out = linear(torch.eye(size, device=weight.device, dtype=dtype))  # the identity gives the transposed weight
    bias = getattr(linear, "bias", None)
    return (out if bias is None else out - bias).T
