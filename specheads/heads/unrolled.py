"""Heads that draft level by level from tapped features, and unroll over their own outputs in training.

`FeatureHead` is what EAGLE-1 and EAGLE-3 share: a small decoder over the target's features. At position t it reads the
target's feature f[t] and the next token x[t+1], and predicts x[t+2].
Shapes: B batch rows, T positions, F tapped features, H hidden, S unrolled steps, R_s drafts of step s, A anchors of a
row, k nodes of a level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, DynamicTree, Plan, chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.hf_base import layer_count
from specheads.decoding.verify.masks import Levels, additive, gather_nodes, visible
from specheads.decoding.verify.model_inputs import BasePositions
from specheads.heads.base import DraftHead, TapBatch
from specheads.heads.config import DecoderConfig, HeadConfig
from specheads.heads.layers.block import Attend, DecoderBlock, RMSNorm, attend_with, read_committed
from specheads.heads.layers.row_attention import RowMask
from specheads.heads.layers.windows import attended_steps, for_each_block
from specheads.heads.sampling import AnchoredStarts, anchored_share, check_anchors
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class UnrolledConfig(HeadConfig, ABC):
    """taps: the states read, as in decoding/verify/taps.py (default: `default_taps`). draft_depth: of the default chain
    on a CPU, where each level costs time. steps: how many drafted steps training unrolls. anchors, anchor_first: see
    AnchoredStarts."""

    taps: tuple[int, ...] | None = None
    draft_depth: int = 5
    steps: int = 1
    anchors: int | None = None
    anchor_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_anchors(self.kind, self.anchors, self.anchor_first, self.dpace)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.taps or ()

    @property
    def served_depth(self) -> int:
        return self.draft_depth

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The states read by default, for a base of `num_layers` layers: the last, after the final norm."""
        return (num_layers,)

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        return {**super().base_defaults(base_config), "taps": self.default_taps(layer_count(base_config))}


@dataclass(frozen=True)
class FeatureConfig(DecoderConfig, UnrolledConfig, ABC):
    """Options of a FeatureHead. qk_norm: its blocks are Qwen3's, with norms on queries and keys."""

    aliases: ClassVar[dict[str, str]] = {"eagle_num_layers": "num_layers"}

    qk_norm: bool = False

    def block_sizes(self) -> dict[str, Any]:
        return {**super().block_sizes(), "qk_norm": self.qk_norm}


class UnrolledHead(DraftHead):
    """A subclass implements `unroll` for training; its `propose` feeds each level the outputs of the previous one."""

    config: UnrolledConfig

    @property
    def scored_depths(self) -> int:
        return self.config.steps

    def passes(self, length: int) -> float:
        return sum(self.passes_of(step, length) for step in range(self.config.steps))

    def passes_of(self, step: int, length: int) -> float:
        """The share of a row's tokens at which an unrolled step is trained."""
        return anchored_share(self.config.anchors, self.config.anchor_first, length, step)

    def usual_plan(self, device: torch.device) -> Plan:
        # On a CPU each node costs time, and chains were fastest (docs/LOG.md); on a GPU some 60 nodes are nearly free.
        return DynamicTree() if device.type == "cuda" else chain(self.config.draft_depth)

    def drafts(self, batch: TapBatch, steps: int, features: Tensor | None = None) -> tuple[DraftTargets, list[Tensor]]:
        """The targets of `steps` steps, in training those of the anchors, and the outputs (R_s, H) of each step."""
        targets, anchors, depth = batch.targets(steps), self.config.anchors, int(not self.config.anchor_first)
        if anchors is None or steps <= depth or not self.training:
            return targets, [targets.gather_starts(out, s) for s, out in enumerate(self.unroll(batch, steps, features))]
        anchored = AnchoredStarts.sample(targets, batch.keys(), anchors, depth)
        targets, slots = anchored.select(targets), anchored.slots(targets)
        outputs = self.unroll(batch, steps, features, anchored)
        return targets, [
            targets.gather_starts(out, s) if s < depth else out.flatten(0, 1)[slots[targets.starts_of(s)]]
            for s, out in enumerate(outputs)
        ]

    @abstractmethod
    def unroll(
        self, batch: TapBatch, steps: int, features: Tensor | None = None, anchored: AnchoredStarts | None = None
    ) -> list[Tensor]:
        """Training-time test: the outputs (B, T, H) of S steps, each fed with the one before.

        anchored: from its depth on, steps start at these anchors alone and their outputs are (B, A, H). At step s,
        position t has read f[t] and x[t+1] … x[t+1+s], and predicts x[t+2+s]. Positions whose tokens run past the end
        hold garbage, which no target uses.
        """


class FeatureHead(UnrolledHead):
    """A subclass implements `fuse` (the features that enter), `inputs` (the first block's input) and `draft_logits`."""

    config: FeatureConfig

    def __init__(self, config: FeatureConfig, input_size: int) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        assert size and eps
        self.blocks = nn.ModuleList(config.block(input_size if i == 0 else size) for i in range(config.num_layers))
        self.later_norms = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(1, config.num_layers))
        self.rotary = config.rotary()
        self.embed_tokens: nn.Embedding | None = None  # of the head's own; None: the base's

    def embed(self, tokens: Tensor, base_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens (B, T) → their embeddings (B, T, H) in the head's dtype."""
        return (base_embed if self.embed_tokens is None else self.embed_tokens)(tokens).to(self.dtype)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → (B, T, H); drafted steps read the output of the step before instead."""

    @abstractmethod
    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded tokens and hidden (B, T, H) → the first block's attention input and its residual."""

    def next_hidden(self, output: Tensor) -> Tensor:
        """An output (B, T, H) → what the next drafted step reads instead of fused features."""
        return output

    def masked_input(self, tokens: Tensor, base_embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
        """What every drafted step after the first reads in place of a token's embedding and an output, each (1, 1, H);
        None: it reads these. tokens: any, for their device."""
        return None

    def forward(self, attend: Attend, embedded: Tensor, hidden: Tensor, position: Tensor) -> Tensor:
        """Embedded tokens, fused features or the last step's `next_hidden`, both (B, T, H), and positions to rotate
        by → output (B, T, H)."""
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
        embedded, masked = self.embed(batch.tokens, batch.embed), self.masked_input(batch.tokens, batch.embed)
        self.rotary.ensure(int(batch.position_ids.max()) + steps + 1, hidden)
        position, length = batch.position_ids, batch.tokens.shape[1]
        column = torch.arange(length, device=hidden.device).expand_as(position)
        asked = anchored.columns if anchored is not None and anchored.depth == 0 else None
        reaches = self.config.reaches
        masks = [RowMask(batch.documents, batch.position_ids, reach) for reach in reaches]  # over the keys of step 0
        keys: list[tuple[Tensor, ...]] = [() for _ in self.blocks]
        values: list[tuple[Tensor, ...]] = [() for _ in self.blocks]

        def attend(block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            # At step 0 the last block may compute the anchors alone; later blocks read all outputs of earlier ones.
            columns = asked if i == len(self.blocks) - 1 and not keys[i] else None
            out, key, value = self.maybe_checkpoint(
                block.unrolled, x, residual, rotary, replace(masks[i], ahead=len(keys[i])),
                attended_steps(keys[i], reaches[i]), attended_steps(values[i], reaches[i]), columns,
            )  # fmt: skip
            keys[i], values[i] = (*keys[i], key), (*values[i], value)
            return out

        outputs = []
        for s in range(steps):
            if s == 1 and anchored is not None:
                column, position = anchored.columns, position.gather(1, anchored.columns)
                masks = [replace(mask, columns=column) for mask in masks]
                hidden = hidden if anchored.depth == 0 else gather_nodes(hidden, column)
            following = gather_nodes(embedded, (column + s + 1) % length)
            if s and masked is not None:
                following, hidden = (each.expand_as(following) for each in masked)
            place = self.rotary.place(position + s, batch.base_positions)
            outputs.append(self(attend, following, hidden, place))
            hidden = self.next_hidden(outputs[-1])
        return outputs

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        target = context.target
        dtype, ids = context.memoize("head", lambda: (self.dtype, self.target_ids))
        # First the positions committed since the last proposal, with the target's features.
        fused, embedded = self.fuse(context.features.to(dtype)), self.embed(context.following, target.embed)
        hidden, cache = read_committed(
            context, plan, fused, self.config.reaches, self.rotary,
            lambda attend, position: self(attend, embedded, fused, self.rotary.place(position, target.base_positions)),
        )  # fmt: skip
        assert self.config.vocab_size is not None
        level = context.newest(hidden).unsqueeze(1)  # (B, k, H)
        masked = self.masked_input(context.root.unsqueeze(1), target.embed)
        if masked is not None:
            steps = self.masked_steps(cache, plan.depth - 1, masked, target.base_positions)
            outputs = torch.cat([level, *steps], 1)
            depths = iter(self.draft_logits(outputs, 0, target.lm_head).split(1, 1))
            return plan.grow(
                context.root, lambda tokens, parents: ChildLogits(next(depths), ids, tokens.shape[1]), sampler,
                self.config.vocab_size,
            )  # fmt: skip
        # Then the tree, level by level, in the scratch slots.
        levels, reaches = Levels(cache, dtype), self.config.reaches

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            nonlocal level
            if parents is not None:
                levels.next_level(parents)
                attend, embedded = (
                    attend_with(cache, for_each_block(reaches, levels.mask)),
                    self.embed(tokens, target.embed),
                )
                place = self.rotary.place(levels.position, target.base_positions)
                level = self(attend, embedded, self.next_hidden(gather_nodes(level, parents)), place)
            return ChildLogits(self.draft_logits(level, 0, target.lm_head), ids)

        return plan.grow(context.root, expand, sampler, self.config.vocab_size)

    def masked_steps(
        self, cache: TreeCache, steps: int, masked: tuple[Tensor, Tensor], base: BasePositions | None
    ) -> list[Tensor]:
        """The outputs (B, S, H) of the S drafted steps after the first, which read `masked`, in one causal pass; [] if
        there are none."""
        if steps < 1:
            return []
        cache.open(steps)
        slot = torch.arange(steps, device=cache.lengths.device).expand(len(cache.lengths), -1)
        earlier = torch.ones(len(slot), steps, steps, dtype=torch.bool, device=slot.device).tril()
        masks = for_each_block(
            self.config.reaches,
            lambda reach: additive(visible(earlier, slot, cache.lengths, cache.attended, reach), self.dtype),
        )
        embedded, hidden = (each.expand(*slot.shape, -1) for each in masked)
        place = self.rotary.place(cache.lengths.unsqueeze(1) + slot, base)
        return [self(attend_with(cache, masks), embedded, hidden, place)]
