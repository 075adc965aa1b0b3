"""Medusa: heads on the last hidden state; head i at position t predicts token t + 2 + i. arXiv:2401.10774."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, Expand, Plan
from specheads.heads.base import TapBatch
from specheads.heads.starts.depths import DepthHeads, DepthHeadsConfig, ResBlock
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class MedusaConfig(DepthHeadsConfig):
    """Trained on the tokens of the text, as published; each head's loss has 0.8 times the weight of the one before."""

    kind: ClassVar[str] = "medusa"
    title: ClassVar[str] = "Medusa"
    aliases: ClassVar[dict[str, str]] = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"}

    loss: str = "hard"
    decay: float = 0.8


class MedusaHead(DepthHeads):
    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        assert config.hidden_size is not None
        size = config.hidden_size
        blocks = [nn.Sequential(*[ResBlock(size) for _ in range(config.num_layers)]) for _ in range(config.num_heads)]
        super().__init__(config, nn.ModuleList(blocks))

    def draft_rows(self, batch: TapBatch, targets: DraftTargets) -> list[Tensor]:
        features = batch.features.to(self.dtype)
        return [self.maybe_checkpoint(block, targets.gather_starts(features, i)) for i, block in enumerate(self.blocks)]

    def expander(self, context: Context, plan: Plan) -> Expand:
        dtype, ids = context.memoize("head", lambda: (self.dtype, self.target_ids))
        hidden = context.newest(context.features).to(dtype)
        depths = zip(self.blocks, self.lm_heads, strict=True)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            block, lm_head = next(depths)
            return ChildLogits(lm_head(block(hidden)).unsqueeze(1), ids, width=tokens.shape[1])

        return expand
