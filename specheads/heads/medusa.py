"""Medusa: K heads on the last hidden state, head i guessing the token i + 2 places on. arXiv:2401.10774."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.drafters.base import Context
from specheads.heads.base import TapBatch
from specheads.heads.vocabulary import DraftVocabulary, DraftVocabularyConfig
from specheads.planner import Plan, Scored, default_static
from specheads.sampling import Sampler
from specheads.tree import DraftTree


@dataclass(frozen=True)
class MedusaConfig(DraftVocabularyConfig):
    """num_heads: depths drafted; num_layers: ResBlocks a head; decay: head i's loss weighs decay^i; tap: the layer
    read (default: the last, after the final norm)."""

    kind: ClassVar[str] = "medusa"
    aliases: ClassVar[dict[str, str]] = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"}

    loss: str = "hard"
    num_heads: int = 5
    num_layers: int = 1
    decay: float = 0.8
    tap: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_heads", "num_layers")
        if not 0 < self.decay <= 1:
            raise ValueError(f"medusa head option decay={self.decay} must be above 0 and at most 1")

    def filled(self, base_config: Any) -> MedusaConfig:
        config = super().filled(base_config)
        layers = base_config.num_hidden_layers
        tap = layers if config.tap is None else config.tap
        if not 0 <= tap <= layers:
            raise ValueError(f"medusa head option tap={tap} is no layer of a base with {layers}: give 0 to {layers}")
        return type(config)(**{**vars(config), "tap": tap})


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), the identity at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(DraftVocabulary):
    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        assert config.hidden_size and config.draft_vocab_size
        size, vocab = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*[ResBlock(size) for _ in range(config.num_layers)]) for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(config.num_heads))

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.tap is not None
        return (self.config.tap,)

    @property
    def scored_depths(self) -> int:
        return self.config.num_heads

    def output_layers(self) -> list[nn.Linear]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def initialise(self, base: Any) -> None:
        self.copy_output_rows(base)

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Any = None) -> Tensor:
        return self.lm_heads[depth](hidden)

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        depths = min(config.num_heads, max(0, batch.tokens.shape[1] - 2))
        if not depths:
            return batch.features.new_zeros(()), {}
        asked = batch.asked(depths)
        features = batch.features.to(self.dtype)
        rows = [self.blocks[i](asked.rows(features, i)) for i in range(depths)]
        scores = self.score(batch, asked, rows, tuple(config.decay**i for i in range(depths)))
        return scores.total / batch.denominator, scores.terms(batch.denominator, whole=depths == config.num_heads)

    def usual_plan(self, device: torch.device) -> Plan:
        return default_static(64 if device.type == "cuda" else 8, self.config.num_heads)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        if plan.depth > self.config.num_heads:
            raise ValueError(
                f"a tree {plan.depth} deep needs as many Medusa heads; this one has {self.config.num_heads}"
            )
        hidden = context.newest(context.features).to(self.dtype)
        depths, ids = zip(self.blocks, self.lm_heads, strict=True), self.target_ids

        def expand(tokens: Tensor, parents: Tensor | None) -> Scored:
            block, lm_head = next(depths)
            return Scored(lm_head(block(hidden)).unsqueeze(1), ids, width=tokens.shape[1])

        assert self.config.vocab_size is not None
        return plan.grow(context.root, expand, sampler, self.config.vocab_size)
