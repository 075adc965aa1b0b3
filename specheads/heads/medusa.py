"""Medusa: K heads on the last hidden state, head i guessing the token i + 2 places on. arXiv:2401.10774."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.drafters.base import Context
from specheads.heads.base import TapBatch, rank_of
from specheads.heads.vocabulary import DraftVocabulary, DraftVocabularyConfig
from specheads.losses import hard_cross_entropy
from specheads.planner import Plan, Scored, default_static
from specheads.sampling import Sampler
from specheads.tree import DraftTree


@dataclass(frozen=True)
class MedusaConfig(DraftVocabularyConfig):
    """num_heads: depths drafted; num_layers: ResBlocks a head; decay: head i's loss weighs decay^i; tap: the layer
    read (default: the last, after the final norm)."""

    kind: ClassVar[str] = "medusa"
    aliases: ClassVar[dict[str, str]] = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"}

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

    def output_layers(self) -> list[nn.Linear]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def initialise(self, base: Any) -> None:
        self.copy_output_rows(base)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """(…, H) → K logits (…, Vd)."""
        hidden = hidden.to(self.dtype)
        return [lm(block(hidden)) for block, lm in zip(self.blocks, self.lm_heads, strict=True)]

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        num_heads = self.config.num_heads
        counted = min(num_heads, batch.tokens.shape[1] - 2)
        total = torch.zeros((), device=batch.features.device)
        terms: dict[str, Tensor] = {}
        ranks = []
        # All heads must have their target for a position to count in the joint accepted length.
        whole = batch.scored(2 + num_heads - 1) if counted == num_heads else None
        teacher = self.draft_ids(batch.logits.argmax(-1))
        tokens = self.draft_ids(batch.tokens)
        logits_of = self(batch.features)
        for i in range(counted):
            ahead = 2 + i
            mask = batch.scored(ahead) & (tokens[:, ahead:] >= 0)
            logits = logits_of[i][:, : mask.shape[1]]
            term = hard_cross_entropy(logits[mask], tokens[:, ahead:][mask]) / batch.denominator
            total = total + self.config.decay**i * term
            terms[f"ce_{i + 1}"] = term.detach()
            if whole is not None:
                span = whole.shape[1]
                ranks.append(rank_of(logits[:, :span][whole].detach(), teacher[:, ahead - 1 : ahead - 1 + span][whole]))
        if ranks:
            terms["ranks"] = torch.stack(ranks, 1)
        return total, terms

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
