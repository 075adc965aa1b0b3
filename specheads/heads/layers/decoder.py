"""Decoder blocks of a head: their sizes, their masks in training, and their KV cache in decoding.

Shapes: B batch rows, T positions, P new positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import Plan
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.hf_base import first_layer
from specheads.decoding.verify.masks import additive
from specheads.heads.base import HeadConfig
from specheads.heads.layers.block import DecoderBlock
from specheads.heads.layers.rope import RotaryTable, check_rope, inherited_rope, refuse_overflow

T = TypeVar("T")
# block, its index, attention input and residual (B, T, H), rotary → output (B, T, H)
Attend = Callable[[DecoderBlock, int, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]


@dataclass(frozen=True)
class DecoderConfig(HeadConfig):
    """Sizes of the head's decoder blocks; None means the base's.

    rope_parameters: as in a transformers 5 config, with rope_type default, linear, llama3 or yarn. The option
    rope_theta alone means rope_type default with that theta.
    """

    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "num_attention_heads": (1, 2**12), "num_key_value_heads": (1, 2**12), "head_dim": (1, 2**14),
        "intermediate_size": (1, 2**24), "rms_norm_eps": (1e-20, 1),
    }  # fmt: skip

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads and shared and heads % shared:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={shared}")
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for RoPE")
        if self.rope_parameters is not None:
            try:
                object.__setattr__(self, "rope_parameters", check_rope(self.rope_parameters))
                refuse_overflow(self.head_dim or 2, self.rope_parameters)
            except ValueError as error:
                raise ValueError(f"{self.kind} head option rope_parameters: {error}") from error

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        # Older heads were saved with rope_theta alone.
        renamed = {name: value for name, value in options.items() if name != "rope_theta"}
        if (theta := options.get("rope_theta")) is not None:
            if renamed.get("rope_parameters") is not None:
                raise ValueError(f"{cls.kind} head options rope_theta and rope_parameters: give theta in the latter")
            renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        return super().from_options(renamed)

    def with_base_defaults(self, base_config: Any) -> Self:
        config = super().with_base_defaults(base_config)
        assert config.hidden_size is not None
        base_config = first_layer(base_config)
        heads = config.num_attention_heads or getattr(base_config, "num_attention_heads", None) or 8
        while config.hidden_size % heads and config.head_dim is None:
            heads //= 2
        base_head_dim = getattr(base_config, "head_dim", None) or config.hidden_size // heads
        key_value = config.num_key_value_heads or getattr(base_config, "num_key_value_heads", None) or heads
        inner = getattr(base_config, "intermediate_size", None) or getattr(base_config, "ffn_hidden_size", None)
        return replace(
            config,
            num_attention_heads=heads,
            num_key_value_heads=key_value if heads % key_value == 0 else heads,
            head_dim=config.head_dim or base_head_dim + base_head_dim % 2,
            intermediate_size=config.intermediate_size or inner or 4 * config.hidden_size,
            rms_norm_eps=config.rms_norm_eps or getattr(base_config, "rms_norm_eps", None) or 1e-6,
            rope_parameters=config.rope_parameters or inherited_rope(base_config),
        )

    def block(self, input_size: int) -> DecoderBlock:
        """A decoder block of these sizes, none of them None, whose attention reads inputs of `input_size`."""
        assert self.hidden_size and self.intermediate_size and self.num_attention_heads and self.num_key_value_heads
        assert self.head_dim and self.rms_norm_eps
        return DecoderBlock(
            hidden_size=self.hidden_size, input_size=input_size, intermediate_size=self.intermediate_size,
            num_heads=self.num_attention_heads, num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps, attention_bias=self.attention_bias, mlp_bias=self.mlp_bias,
        )  # fmt: skip

    def rotary(self) -> RotaryTable:
        assert self.head_dim and self.rope_parameters
        return RotaryTable(self.head_dim, self.rope_parameters)


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) document ids → (B, 1, T, T) additive mask: causal within each document."""
    column = torch.arange(documents.shape[1], device=documents.device)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return additive(same & (column <= column.unsqueeze(1)), dtype)


def attend_with(cache: TreeCache, mask: Tensor | None) -> Attend:
    """An `Attend` over a head's own cache; mask None: causal over the pass itself."""

    def attend(block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return block.cached(x, residual, rotary, cache, i, mask)

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
    context: Context, plan: Plan, hidden: Tensor, num_layers: int, rotary: RotaryTable,
    run: Callable[[Attend, Tensor], Tensor],
) -> tuple[Tensor, TreeCache]:  # fmt: skip
    """Run the head on the positions committed since the last proposal, hidden (B, P, H).

    Returns the result of run(attend, positions (B, P)), and the head's own cache, which now has their keys and values.
    """

    def write(cache: TreeCache, position: Tensor, fresh: bool) -> Tensor:
        mask = None if fresh else additive(cache.positions <= position.unsqueeze(-1), hidden.dtype)
        return run(attend_with(cache, mask), position)

    return keep_committed(context, max(plan.depth + 1, plan.drafting_slots), hidden, num_layers, rotary, write)
