"""Where a training-time test goes on behind its first step: at a sample of each row's starts, weighed to stand for all.

Shapes: B batch rows, T positions, A anchored starts of a row, R supervised positions, M drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.objective import Asked


@dataclass(frozen=True, slots=True)
class AnchoredStarts:
    """columns (B, A); weights (B, A): how many starts each stands for, 0 where it only fills the row up."""

    columns: Tensor
    weights: Tensor

    @classmethod
    def drawn(cls, asked: Asked, batch: int, most: int) -> AnchoredStarts:
        """Of each of `batch` rows, `most` of the starts that are asked for a draft behind their first, or all of them.
        Each is as likely as any other, so that a weighed sum over them is unbiased."""
        deeper = asked.valid[:, 1:]
        wanted = torch.zeros(asked.size, dtype=torch.bool, device=deeper.device)
        wanted[asked.starts[:, 1:][deeper]] = True
        wanted = wanted.view(batch, -1)
        count = wanted.sum(1, keepdim=True)
        order = torch.rand(wanted.shape, device=wanted.device).masked_fill(~wanted, -1)
        columns = order.topk(min(most, int(count.max())), 1).indices
        return cls(columns, wanted.gather(1, columns) * (count / count.clamp(1, most)))

    def drafts(self, asked: Asked) -> tuple[Asked, list[Tensor]]:
        """Every first draft and the anchored starts' deeper ones, each by itself (S = 1) and depth by depth; and where
        each stands in the outputs of its depth laid flat, (B · T) of the first and (B · A) of the others."""
        batch, number = self.columns.shape
        place = torch.arange(batch, device=self.columns.device).unsqueeze(1) * (asked.size // batch) + self.columns
        slot = torch.full((asked.size,), -1, device=place.device)
        used = self.weights > 0
        slot[place[used]] = torch.arange(batch * number, device=place.device).view_as(place)[used]
        rows, depths, outputs, weights = [], [], [], []
        for depth in range(asked.num_depths):
            at = slot[asked.starts[:, depth]] if depth else asked.starts[:, depth]
            row = (asked.valid[:, depth] & (at >= 0)).nonzero().squeeze(1)
            rows.append(row)
            depths.append(torch.full_like(row, depth))
            outputs.append(at[row])
            weights.append(asked.weights[row, depth] * (self.weights.flatten()[at[row]] if depth else 1))
        row, of = torch.cat(rows), torch.cat(depths)
        single = replace(
            asked, positions=asked.positions[row], tokens=asked.tokens[row],
            starts=asked.starts[row, of].unsqueeze(1), depths=of.unsqueeze(1),
            weights=torch.cat(weights).unsqueeze(1),
        )  # fmt: skip
        return single, outputs
