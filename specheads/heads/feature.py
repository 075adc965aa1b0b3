"""What EAGLE-1 and EAGLE-3 share: a small decoder over the target's features, unrolled in training and in drafting.

At position t the head reads the target's feature f[t] and the next token x[t+1], and predicts x[t+2].
Shapes: B batch rows, T positions, F tapped features, H hidden, S unrolled steps, A anchors of a row, k nodes of a
level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.masks import Levels, Reach, gather_nodes
from specheads.heads.base import TapBatch
from specheads.heads.layers.block import DecoderBlock
from specheads.heads.layers.decoder import Attend, DecoderConfig, attend_with, document_mask, read_committed
from specheads.heads.layers.norm import RMSNorm
from specheads.heads.limits import MOST_LAYERS
from specheads.heads.starts.anchors import AnchoredStarts
from specheads.heads.unrolled import TappedConfig, UnrolledConfig, UnrolledHead


@dataclass(frozen=True)
class FeatureHeadConfig(DecoderConfig, TappedConfig, ABC):
    """num_layers: decoder blocks of the head."""

    aliases: ClassVar[dict[str, str]] = {"eagle_num_layers": "num_layers"}
    bounds: ClassVar[dict[str, tuple[float, float]]] = {"num_layers": (1, MOST_LAYERS)}

    num_layers: int = 1


@dataclass(frozen=True)
class UnrolledFeatureConfig(UnrolledConfig, FeatureHeadConfig, ABC):
    """Options of a head that is unrolled in training."""


class FeatureHead(UnrolledHead):
    """A subclass implements `fuse` (the features that enter), `inputs` (the first block's input) and `draft_logits`."""

    config: UnrolledFeatureConfig

    def __init__(self, config: UnrolledFeatureConfig, input_size: int) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        assert size and eps
        self.blocks = nn.ModuleList(config.block(input_size if i == 0 else size) for i in range(config.num_layers))
        self.later_norms = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(1, config.num_layers))
        self.rotary = config.rotary()

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → (B, T, H); drafted steps read the output of the step before instead."""

    @abstractmethod
    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded tokens and hidden (B, T, H) → the first block's attention input and its residual."""

    def next_hidden(self, output: Tensor) -> Tensor:
        """An output (B, T, H) → what the next drafted step reads instead of fused features."""
        return output

    def forward(self, attend: Attend, embedded: Tensor, hidden: Tensor, position: Tensor) -> Tensor:
        """Embedded tokens, fused features or the last step's `next_hidden`, both (B, T, H), and positions (B, T) →
        output (B, T, H)."""
        rotary = self.rotary(position)
        x, residual = self.inputs(embedded, hidden)
        for i, block in enumerate(self.blocks):
            if i:
                x, residual = self.later_norms[i - 1](hidden), hidden
            hidden = attend(block, i, x, residual, rotary)  # type: ignore[arg-type]
        return hidden

    def unroll(
        self, batch: TapBatch, steps: int, features: Tensor | None = None, anchored: AnchoredStarts | None = None
    ) -> list[Tensor]:
        hidden = self.fuse((batch.features if features is None else features).to(self.dtype))
        embedded = batch.embed(batch.tokens).to(self.dtype)
        self.rotary.ensure(int(batch.position_ids.max()) + steps + 1, hidden)
        mask, position = document_mask(batch.documents, hidden.dtype), batch.position_ids
        length = position.shape[1]
        column = torch.arange(length, device=hidden.device).expand_as(position)
        asked = anchored.columns if anchored is not None and anchored.depth == 0 else None
        keys: list[tuple[Tensor, ...]] = [() for _ in self.blocks]
        values: list[tuple[Tensor, ...]] = [() for _ in self.blocks]

        def attend(block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            # At step 0 the last block may compute the anchors alone; later blocks read all outputs of earlier ones.
            columns = asked if i == len(self.blocks) - 1 and not keys[i] else None
            out, key, value = self.maybe_checkpoint(
                block.unrolled, x, residual, rotary, mask, keys[i], values[i], columns
            )
            keys[i], values[i] = (*keys[i], key), (*values[i], value)
            return out

        outputs = []
        for s in range(steps):
            if s == 1 and anchored is not None:
                column, position = anchored.columns, position.gather(1, anchored.columns)
                mask = gather_nodes(mask.squeeze(1), column).unsqueeze(1)
                hidden = hidden if anchored.depth == 0 else gather_nodes(hidden, column)
            following = gather_nodes(embedded, (column + s + 1) % length)
            outputs.append(self(attend, following, hidden, position + s))
            hidden = self.next_hidden(outputs[-1])
        return outputs

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        target = context.target
        dtype, ids = context.memoize("head", lambda: (self.dtype, self.target_ids))
        # First the positions committed since the last proposal, with the target's features.
        fused, embedded = self.fuse(context.features.to(dtype)), target.embed(context.following).to(dtype)
        hidden, cache = read_committed(
            context, plan, fused, len(self.blocks), self.rotary,
            lambda attend, position: self(attend, embedded, fused, position),
        )  # fmt: skip
        # Then the tree, level by level, in the scratch slots.
        levels, level = Levels(cache, dtype), context.newest(hidden).unsqueeze(1)  # (B, k, H)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            nonlocal level
            if parents is not None:
                levels.next_level(parents)
                attend, embedded = attend_with(cache, levels.mask(Reach())), target.embed(tokens).to(dtype)
                level = self(attend, embedded, self.next_hidden(gather_nodes(level, parents)), levels.position)
            return ChildLogits(self.draft_logits(level, 0, target.lm_head), ids)

        assert self.config.vocab_size is not None
        return plan.grow(context.root, expand, sampler, self.config.vocab_size)
