"""Deeper drafts at a sample of each row's starts, weighed to stand for all: fewer matrix products, the same gradient in
expectation.

Shapes: B batch rows, T positions, A anchored starts of a row, S drafts of a position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specheads.heads import draws
from specheads.heads.base import HeadConfig
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class AnchoredStartsConfig(HeadConfig):
    """anchors: starts of a row at which a training step asks for more than the first draft, drawn at random (default:
    all). Fewer cost less memory and time, and the loss is an unbiased estimate; the accepted length that training logs
    is of those starts alone, each counted once, so that long rows count for less. Evaluation has them all."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {"anchors": (1, 2**20)}

    anchors: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors is not None and self.dpace is not None:
            raise ValueError(
                f"{self.kind} head options anchors and dpace: a draft is weighed by its deeper ones, which anchors "
                "leave out; give one of them"
            )

    def share(self, length: int) -> float:
        """Of the starts of a row of so many tokens that have deeper drafts in training."""
        return min(self.anchors or length, length) / length


@dataclass(frozen=True, slots=True)
class AnchoredStarts:
    """columns (B, A); weights (B, A): how many starts each stands for, 0 where it only fills the row up."""

    columns: Tensor
    weights: Tensor

    @classmethod
    def drawn(cls, asked: DraftTargets, keys: Tensor, most: int) -> AnchoredStarts:
        """Of each row, `most` of the starts that are asked for a draft behind their first, or all of them. Each is as
        likely as any other, so that a weighed sum over them is unbiased. keys (B, T): see TapBatch.keys."""
        deeper = asked.valid[:, 1:]
        wanted = torch.zeros(asked.size, dtype=torch.bool, device=deeper.device)
        wanted[asked.starts[:, 1:][deeper]] = True
        wanted = wanted.view(keys.shape)
        count = wanted.sum(1, keepdim=True)
        order = draws.uniform(keys).masked_fill(~wanted, -1)
        columns = order.topk(min(most, int(count.max())), 1).indices
        return cls(columns, wanted.gather(1, columns) * (count / count.clamp(1, most)))

    def drafts(self, asked: DraftTargets) -> DraftTargets:
        """Every first draft, and the deeper ones of the anchored starts."""
        place = torch.arange(len(self.columns), device=self.columns.device).unsqueeze(1) * self._length(asked)
        standing = self.weights.new_zeros(asked.size)
        standing[(place + self.columns)[self.weights > 0]] = self.weights[self.weights > 0]
        weights = torch.cat([asked.weights[:, :1], asked.weights[:, 1:] * standing[asked.starts[:, 1:]]], 1)
        return replace(asked, weights=weights)

    def slots(self, asked: DraftTargets) -> Tensor:
        """(B · T,) where what is made of the columns alone, (B · A, …), has each start."""
        batch, number = self.columns.shape
        rows = torch.arange(batch, device=self.columns.device).unsqueeze(1)
        slot = torch.zeros(asked.size, dtype=torch.long, device=rows.device)
        slot[rows * self._length(asked) + self.columns] = rows * number + torch.arange(number, device=rows.device)
        return slot

    def _length(self, asked: DraftTargets) -> int:
        return asked.size // len(self.columns)
