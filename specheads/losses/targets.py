"""Draft targets: the supervised positions of a batch, and where the drafts for each started.

Position u of a text has the target x[u+1]. Its draft at depth s (0 is the first) started at position u − 1 − s, where
the head had read the text up to and including the next token, x[u − s].
Shapes: B batch rows, T positions, R supervised positions, D depths, S drafts of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTargets:
    """The supervised positions of a batch and where their drafts started.

    positions (R,), and starts (R, S) of their drafts: indices into the flattened batch of `size` = B · T positions.
    tokens (R,): the targets. depths (R, S): of the drafts, below num_depths = D.
    weights (R, S): how many drafts each represents; 0 if its start is not in the same document, or was not sampled.
    """

    positions: Tensor
    tokens: Tensor
    starts: Tensor
    depths: Tensor
    weights: Tensor
    size: int
    num_depths: int

    @classmethod
    def from_batch(cls, tokens: Tensor, supervised: Tensor, documents: Tensor, depths: int) -> DraftTargets:
        """Each position's drafts of every depth, S = D.

        tokens, supervised (indexed by the predicted token) and documents, all (B, T); document 0 is padding.
        """
        batch, length = tokens.shape
        has_target = supervised[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        row, column = has_target.nonzero(as_tuple=True)
        depth = torch.arange(depths, device=tokens.device).expand(len(row), -1)
        start = column.unsqueeze(1) - 1 - depth  # (R, S)
        same = documents[row.unsqueeze(1), start.clamp_min(0)] == documents[row, column].unsqueeze(1)
        starts = row.unsqueeze(1) * length + start.clamp_min(0)
        weights = (same & (start >= 0)).float()
        return cls(row * length + column, tokens[row, column + 1], starts, depth, weights, batch * length, depths)

    @property
    def valid(self) -> Tensor:
        """(R, S) whether the draft exists."""
        return self.weights > 0

    @property
    def complete(self) -> Tensor:
        """(R, S) whether the draft exists, and its start has all D drafts."""
        all_drafts = self.scatter_by_start(self.valid).all(1)
        return all_drafts[self.starts] & self.valid

    def indices_of(self, draft: int) -> Tensor:
        """(R_s,) the ascending indices of the supervised positions that have draft s."""
        return self.valid[:, draft].nonzero().squeeze(1)

    def starts_of(self, draft: int) -> Tensor:
        """(R_s,) where the drafts s started."""
        return self.starts[self.valid[:, draft], draft]

    def gather_starts(self, values: Tensor, draft: int) -> Tensor:
        """Values at starts (B, T, …) → those of the drafts s, in the order of their targets (R_s, …)."""
        return values.flatten(0, 1)[self.starts_of(draft)]

    def scatter_by_start(self, values: Tensor) -> Tensor:
        """Values by target (R, S) → by start (B · T, D); 0 where there is no draft."""
        count = self.size * self.num_depths
        index = torch.where(self.valid, self.starts * self.num_depths + self.depths, count)
        scattered = values.new_zeros(count + 1).scatter(0, index.flatten(), values.flatten())
        return scattered[:-1].view(self.size, self.num_depths)

    def scatter_complete(self, values: Tensor) -> Tensor:
        """Values by target (R, S) → (R', D): one row for each start that has all D drafts."""
        return self.scatter_by_start(values)[self.scatter_by_start(self.valid).all(1)]
