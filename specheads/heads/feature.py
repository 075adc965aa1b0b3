"""What EAGLE-1 and EAGLE-3 share: a small decoder over the target's features, unrolled in training and in drafting.

At position t the head reads the target's feature f[t] and the next token x[t+1], and predicts x[t+2].
Shapes: B batch rows, T positions, F tapped features, H hidden, S unrolled steps, R_s drafts of step s, A anchors of a
row, k nodes of a level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, DynamicTree, Plan, chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.target.cache import Levels, Reach, gather_nodes
from specheads.decoding.tree import DraftTree
from specheads.heads.base import DraftHead, TapBatch
from specheads.heads.layers.block import DecoderBlock
from specheads.heads.layers.decoder import Attend, DecoderConfig, attend_with, document_mask, read_committed
from specheads.heads.limits import ANY_LAYER, DEEPEST, MOST_LAYERS
from specheads.heads.starts.anchors import AnchoredStarts, AnchoredStartsConfig
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class FeatureHeadConfig(DecoderConfig, ABC):
    """num_layers: of the decoder. taps: the layers read. draft_depth: of the default chain on a CPU, where each level
    costs time."""

    aliases: ClassVar[dict[str, str]] = {"eagle_num_layers": "num_layers"}
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "num_layers": (1, MOST_LAYERS), "draft_depth": (1, DEEPEST), "taps": ANY_LAYER,
    }  # fmt: skip

    num_layers: int = 1
    taps: tuple[int, ...] | None = None
    draft_depth: int = 5

    @property
    def served_depth(self) -> int:
        return self.draft_depth

    @classmethod
    @abstractmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The layers read by default, of a base of `num_layers`."""

    def with_base_defaults(self, base_config: Any) -> Self:
        config, layers = super().with_base_defaults(base_config), base_config.num_hidden_layers
        filled = replace(config, taps=config.taps or config.default_taps(layers))
        for tap in filled.taps or ():
            if not 0 <= tap <= layers:
                raise ValueError(
                    f"tapped layer {tap} does not exist: the base has {layers} layers, so hidden_states 0 to {layers}"
                )
        return filled


@dataclass(frozen=True)
class UnrolledConfig(AnchoredStartsConfig, FeatureHeadConfig, ABC):
    """steps: how many drafted steps training unrolls."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {"steps": (1, DEEPEST)}

    steps: int = 1


class FeatureHead(DraftHead):
    """A subclass gives the features that enter (`fuse`), the first block's input (`inputs`), and `draft_logits`."""

    config: UnrolledConfig

    def __init__(self, config: UnrolledConfig, input_size: int) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        assert size and eps
        self.blocks = nn.ModuleList(config.block(input_size if i == 0 else size) for i in range(config.num_layers))
        self.later_norms = nn.ModuleList(nn.RMSNorm(size, eps=eps) for _ in range(1, config.num_layers))
        self.rotary = config.rotary()

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.taps is not None
        return self.config.taps

    def passes(self, length: int) -> float:
        return 1 + (self.config.steps - 1) * self.config.anchored_share(length)

    def unrolled_starts(self, length: int) -> int:
        return (self.config.steps - 1) * min(self.config.anchors or length, length)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → (B, T, H); a drafted step reads the output of the step before in their place."""

    @abstractmethod
    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded tokens and hidden (B, T, H) → the first block's attention input and its residual."""

    def next_hidden(self, output: Tensor) -> Tensor:
        """An output (B, T, H) → what the next drafted step reads in place of fused features."""
        return output

    def usual_plan(self, device: torch.device) -> Plan:
        # On a CPU each node costs time, and chains won (docs/LOG.md); on a GPU up to some 60 nodes are nearly free.
        return DynamicTree() if device.type == "cuda" else chain(self.config.draft_depth)

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

    def drafts(self, batch: TapBatch, steps: int, features: Tensor | None = None) -> tuple[DraftTargets, list[Tensor]]:
        """The targets of so many steps, in training those of the anchors, and the outputs (R_s, H) of each step."""
        targets, anchors = batch.targets(steps), self.config.anchors
        if anchors is None or steps == 1 or not self.training:
            return targets, [targets.gather_starts(out, s) for s, out in enumerate(self.unroll(batch, steps, features))]
        anchored = AnchoredStarts.sample(targets, batch.keys(), anchors)
        targets, slots = anchored.select(targets), anchored.slots(targets)
        first, *later = self.unroll(batch, steps, features, anchored.columns)
        rows = [out.flatten(0, 1)[slots[targets.starts_of(s)]] for s, out in enumerate(later, 1)]
        return targets, [targets.gather_starts(first, 0), *rows]

    def unroll(
        self, batch: TapBatch, steps: int, features: Tensor | None = None, anchored: Tensor | None = None
    ) -> list[Tensor]:
        """Training-time test: the outputs (B, T, H) of S steps, each fed by the one before.

        anchored (B, A): the columns of the later steps, whose outputs are then (B, A, H). At step s, position t has
        read f[t] and x[t+1] … x[t+1+s], and predicts x[t+2+s]. Positions whose tokens run past the end hold garbage,
        which no target uses.
        """
        hidden = self.fuse((batch.features if features is None else features).to(self.dtype))
        embedded = batch.embed(batch.tokens).to(self.dtype)
        self.rotary.ensure(int(batch.position_ids.max()) + steps + 1, hidden)
        mask, position = document_mask(batch.documents, hidden.dtype), batch.position_ids
        length = position.shape[1]
        column = torch.arange(length, device=hidden.device).expand_as(position)
        keys: list[tuple[Tensor, ...]] = [() for _ in self.blocks]
        values: list[tuple[Tensor, ...]] = [() for _ in self.blocks]

        def attend(block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            out, key, value = self.maybe_checkpoint(block.unrolled, x, residual, rotary, mask, keys[i], values[i])
            keys[i], values[i] = (*keys[i], key), (*values[i], value)
            return out

        outputs = []
        for s in range(steps):
            if s == 1 and anchored is not None:
                column, position, hidden = anchored, position.gather(1, anchored), gather_nodes(hidden, anchored)
                mask = mask.gather(2, anchored[:, None, :, None].expand(-1, 1, -1, length))
            following = gather_nodes(embedded, (column + s + 1) % length)
            outputs.append(self(attend, following, hidden, position + s))
            hidden = self.next_hidden(outputs[-1])
        return outputs

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        target = context.target
        dtype, ids = context.once("head", lambda: (self.dtype, self.target_ids))
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
