"""What EAGLE-1 and EAGLE-3 share: drafting and unrolling a small decoder over the target's features.

At position t the head reads the target's feature f[t] and the token behind it, x[t+1], and guesses x[t+2].
Shapes: B batch rows, T positions, F tapped features, H hidden, N tree nodes, S unrolled steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specheads.cache import Levels, Reach, TreeCache, additive, rows_of, visible
from specheads.drafters.base import Context
from specheads.heads.base import DraftHead, HeadConfig, TapBatch
from specheads.heads.block import Block, RotaryTable, Unroll
from specheads.planner import DynamicTree, Plan, Scored, chain
from specheads.sampling import Sampler
from specheads.tree import DraftTree


@dataclass(frozen=True)
class FeatureHeadConfig(HeadConfig, ABC):
    """Sizes of the decoder; those left None are the base's own. draft_depth: of the default chain on a CPU,
    where each level costs time; as deep as its drafts are usually right."""

    aliases: ClassVar[dict[str, str]] = {"eagle_num_layers": "num_layers"}

    num_layers: int = 1
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    taps: tuple[int, ...] | None = None
    draft_depth: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        self._at_least(1, "draft_depth")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads and shared and heads % shared:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={shared}")
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for RoPE")

    @classmethod
    @abstractmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The layers read by default, for a base of `num_layers`."""

    def filled(self, base_config: Any) -> Self:
        config = super().filled(base_config)
        assert config.hidden_size is not None
        heads = config.num_attention_heads or getattr(base_config, "num_attention_heads", None) or 8
        while config.hidden_size % heads and config.head_dim is None:
            heads //= 2
        own_head_dim = getattr(base_config, "head_dim", None) or config.hidden_size // heads
        key_value = config.num_key_value_heads or getattr(base_config, "num_key_value_heads", None) or heads
        inner = getattr(base_config, "intermediate_size", None) or getattr(base_config, "ffn_hidden_size", None)
        rope = getattr(base_config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if "rope_theta" in rope else None
        layers = base_config.num_hidden_layers
        filled = replace(
            config,
            num_attention_heads=heads,
            num_key_value_heads=key_value if heads % key_value == 0 else heads,
            head_dim=config.head_dim or own_head_dim + own_head_dim % 2,
            intermediate_size=config.intermediate_size or inner or 4 * config.hidden_size,
            rms_norm_eps=config.rms_norm_eps or getattr(base_config, "rms_norm_eps", None) or 1e-6,
            rope_theta=config.rope_theta or theta or 10_000.0,
            taps=config.taps or config.default_taps(layers),
        )
        for tap in filled.taps or ():
            if not 0 <= tap <= layers:
                raise ValueError(
                    f"tapped layer {tap} does not exist: the base has {layers} layers, so hidden_states 0 to {layers}"
                )
        return filled


class FeatureHead(DraftHead):
    """Subclasses say how features enter (`fuse`), what the first block reads (`inputs`), and the law it gives."""

    config: FeatureHeadConfig

    def __init__(self, config: FeatureHeadConfig, input_size: int) -> None:
        super().__init__(config)
        c = config
        assert c.hidden_size and c.intermediate_size and c.num_attention_heads and c.num_key_value_heads
        assert c.head_dim and c.rms_norm_eps and c.rope_theta
        self.blocks = nn.ModuleList(
            Block(
                hidden_size=c.hidden_size, input_size=input_size if i == 0 else c.hidden_size,
                intermediate_size=c.intermediate_size, num_heads=c.num_attention_heads,
                num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
                attention_bias=c.attention_bias, mlp_bias=c.mlp_bias,
            )
            for i in range(c.num_layers)
        )  # fmt: skip
        self.later_norms = nn.ModuleList(nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(1, c.num_layers))
        self.rotary = RotaryTable(c.head_dim, c.rope_theta)

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.taps is not None
        return self.config.taps

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → (B, T, H), what a drafted step's own output replaces later on."""

    @abstractmethod
    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded tokens and hidden (B, T, H) → the first block's attention input and its residual."""

    def usual_plan(self, device: torch.device) -> Plan:
        # On a CPU each node costs time, and chains won (docs/LOG.md); on a GPU up to some 60 nodes are nearly free.
        return DynamicTree() if device.type == "cuda" else chain(self.config.draft_depth)

    def forward(self, attend: Any, embedded: Tensor, hidden: Tensor, position: Tensor) -> Tensor:
        """Embedded tokens, fused features or the last output, and positions of T tokens → output (B, T, H)."""
        rotary = self.rotary(position)
        x, residual = self.inputs(embedded, hidden)
        for i, block in enumerate(self.blocks):
            if i:
                x, residual = self.later_norms[i - 1](hidden), hidden
            hidden = attend(block, i, x, residual, rotary)
        return hidden

    def unroll(self, batch: TapBatch, steps: int, features: Tensor | None = None) -> list[Tensor]:
        """Training-time test: the outputs (B, T, H) of S steps, each fed by the one before.

        At step s row t has read f[t] and x[t+1] … x[t+1+s] and speaks of x[t+2+s]. Rows whose tokens run past the
        end hold garbage, which nothing asks for.
        """
        hidden = self.fuse((batch.features if features is None else features).to(self.dtype))
        embedded = batch.embed(batch.tokens).to(self.dtype)
        length = batch.tokens.shape[1]
        self.rotary.ensure(int(batch.position_ids.max()) + steps + 1, hidden)
        place = torch.arange(length, device=hidden.device)
        same = batch.documents.unsqueeze(2) == batch.documents.unsqueeze(1)
        mask = additive(same & (place <= place.unsqueeze(1)), hidden.dtype)
        caches = [Unroll() for _ in self.blocks]

        def attend(block: Block, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            return block.unrolled(x, residual, rotary, mask, caches[i])

        outputs = []
        for s in range(steps):
            shifted = torch.cat([embedded[:, s + 1 :], embedded[:, : s + 1]], 1)
            hidden = self(attend, shifted, hidden, batch.position_ids + s)
            outputs.append(hidden)
        return outputs

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        target, memory, dtype = context.target, context.memory, self.dtype
        hidden = self.fuse(context.features.to(dtype))
        batch, columns, _ = hidden.shape

        def attend_with(mask: Tensor | None) -> Any:
            def attend(block: Block, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
                return block.cached(x, residual, rotary, memory["cache"], i, mask)

            return attend

        # First the positions committed since last time, with the target's true features.
        embedded = target.embed(context.following).to(dtype)
        chain = torch.arange(columns, device=hidden.device).expand(batch, columns)
        if "cache" not in memory:
            scratch = max(plan.depth + 1, plan.drafting_slots)
            memory["cache"] = TreeCache(len(self.blocks), scratch, target.cache.capacity)
            # A row may overshoot the limit by one path when it ends, and is then fed a path of padding with the rest.
            self.rotary.ensure(target.limit + 2 * scratch, hidden)
            hidden = self(attend_with(None), embedded, hidden, chain)
            memory["cache"].settle(context.new, columns)
            cache = memory["cache"]
        else:
            cache = memory["cache"]
            cache.open()
            causal = chain.unsqueeze(1) <= chain.unsqueeze(2)
            mask = additive(visible(causal, chain, cache.lengths, cache.scratch, cache.attended, Reach()), dtype)
            hidden = self(attend_with(mask), embedded, hidden, cache.lengths.unsqueeze(1) + chain)
            cache.commit(chain, context.new, context.bound)
        # Then the tree, level by level, in the scratch slots.
        levels, level, ids = Levels(cache, dtype), context.newest(hidden).unsqueeze(1), self.target_ids  # (B, k, H)

        def expand(tokens: Tensor, parents: Tensor | None) -> Scored:
            nonlocal level
            if parents is not None:
                levels.descend(parents)
                embedded = target.embed(tokens).to(dtype)
                level = self(attend_with(levels.mask(Reach())), embedded, rows_of(level, parents), levels.position)
            return Scored(self.draft_logits(level, 0, target.lm_head), ids)

        assert self.config.vocab_size is not None
        return plan.grow(context.root, expand, sampler, self.config.vocab_size)
