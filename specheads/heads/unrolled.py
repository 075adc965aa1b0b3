"""Base classes of heads that draft level by level from tapped features, and unroll over their own outputs in training.

Shapes: B batch rows, T positions, F tapped features, H hidden, S unrolled steps, R_s drafts of step s, A anchors of a
row.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specheads.decoding.planner import DynamicTree, Plan, chain
from specheads.decoding.verify.hf_base import layer_count
from specheads.decoding.verify.taps import refuse_missing_taps
from specheads.heads.base import DraftHead, HeadConfig, TapBatch
from specheads.heads.limits import ANY_LAYER, DEEPEST
from specheads.heads.starts.anchors import AnchoredStarts, AnchoredStartsConfig
from specheads.losses.targets import DraftTargets

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TappedConfig(HeadConfig, ABC):
    """taps: the states read, as in decoding/verify/taps.py. draft_depth: of the default chain on a CPU, where each
    level costs time."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {"draft_depth": (1, DEEPEST), "taps": ANY_LAYER}

    taps: tuple[int, ...] | None = None
    draft_depth: int = 5

    @property
    def served_depth(self) -> int:
        return self.draft_depth

    @classmethod
    @abstractmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """The layers read by default, for a base of `num_layers` layers."""

    def with_base_defaults(self, base_config: Any) -> Self:
        config, layers = super().with_base_defaults(base_config), layer_count(base_config)
        filled = replace(config, taps=config.taps or config.default_taps(layers))
        refuse_missing_taps(filled.taps or (), base_config)
        if self.taps is None and filled.taps is not None and len(set(filled.taps)) < len(filled.taps):
            _log.warning(
                "%s: a base of %d layers has too few for %d taps: the head reads layers %s, some more than once",
                filled.kind, layers, len(filled.taps), ", ".join(map(str, filled.taps)),
            )  # fmt: skip
        return filled


@dataclass(frozen=True)
class UnrolledConfig(AnchoredStartsConfig, TappedConfig, ABC):
    """steps: how many drafted steps training unrolls."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {"steps": (1, DEEPEST)}

    steps: int = 1


class UnrolledHead(DraftHead):
    """A subclass implements `unroll` for training; its `propose` feeds each level the outputs of the previous one."""

    config: UnrolledConfig

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.taps is not None
        return self.config.taps

    def passes(self, length: int) -> float:
        return sum(self.config.anchored_share(length, s) for s in range(self.config.steps))

    def unrolled_starts(self, length: int) -> int:
        return (self.config.steps - 1) * min(self.config.anchors or length, length)

    def usual_plan(self, device: torch.device) -> Plan:
        # On a CPU each node costs time, and chains were fastest (docs/LOG.md); on a GPU some 60 nodes are nearly free.
        return DynamicTree() if device.type == "cuda" else chain(self.config.draft_depth)

    def drafts(self, batch: TapBatch, steps: int, features: Tensor | None = None) -> tuple[DraftTargets, list[Tensor]]:
        """The targets of `steps` steps, in training those of the anchors, and the outputs (R_s, H) of each step."""
        targets, anchors, depth = batch.targets(steps), self.config.anchors, self.config.anchored_depth
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
