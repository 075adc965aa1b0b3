"""Draft targets: the supervised positions of a batch, and where the drafts for each started.

Position u of a text has the target x[u+1]. Its draft at depth s (0 is the first) started at position u − 1 − s, where
the head had read the text up to and including the next token, x[u − s].
Decoding drafts from a token that was generated, and a step gains the accepted drafts and a token of the base's own, up
to the end of the answer. So a draft gains something only if its target is followed by another token of the answer: the
last one comes with the step in any case. Where the supervised tokens end, by an end of turn or a cut, the answer ends.
Shapes: B batch rows, T positions, R supervised positions, D depths, S drafts of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ENDED = -2  # in place of a rank, where a draft gains nothing


@dataclass(frozen=True, slots=True)
class DraftTargets:
    """The supervised positions of a batch and where their drafts started.

    positions (R,), and starts (R, S) of their drafts: indices into the flattened batch of `size` = B · T positions.
    tokens (R,): the targets. depths (R, S): of the drafts, below num_depths = D.
    weights (R, S): how many drafts each represents; 0 if its start is not in the same document, or was not sampled.
    left (B · T,): see `tokens_left`; 0 for starts that were not sampled.
    """

    positions: Tensor
    tokens: Tensor
    starts: Tensor
    depths: Tensor
    weights: Tensor
    left: Tensor
    size: int
    num_depths: int

    @classmethod
    def from_batch(cls, tokens: Tensor, supervised: Tensor, documents: Tensor, depths: int) -> DraftTargets:
        """Each position's drafts of every depth, S = D.

        tokens, supervised (indexed by the predicted token) and documents, all (B, T); document 0 is padding.
        """
        batch, length = tokens.shape
        row, column = _has_target(supervised, documents).nonzero(as_tuple=True)
        depth = torch.arange(depths, device=tokens.device).expand(len(row), -1)
        start = column.unsqueeze(1) - 1 - depth  # (R, S)
        same = documents[row.unsqueeze(1), start.clamp_min(0)] == documents[row, column].unsqueeze(1)
        starts = row.unsqueeze(1) * length + start.clamp_min(0)
        weights = (same & (start >= 0)).float()
        left = tokens_left(supervised, documents).flatten()
        return cls(row * length + column, tokens[row, column + 1], starts, depth, weights, left, batch * length, depths)

    @property
    def valid(self) -> Tensor:
        """(R, S) whether the draft exists."""
        return self.weights > 0

    @property
    def counted(self) -> Tensor:
        """(R, S) whether the draft exists, and decoding gains something if it is right."""
        return self.valid & (self.depths < self.left[self.starts] - 1)

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

    def scatter_counted(self, values: Tensor, uncounted: float) -> Tensor:
        """Values by target (R, S) → (R', D): one row for each start of a decoding step; `uncounted` where `counted` is
        False."""
        left = self.left[self.left > 0].unsqueeze(1)
        by_start = self.scatter_by_start(values)[self.left > 0]
        return by_start.masked_fill(torch.arange(self.num_depths, device=left.device) >= left - 1, uncounted)


def tokens_left(supervised: Tensor, documents: Tensor) -> Tensor:
    """(B, T) how many tokens of its answer follow the token that each start drafts from; 0 if that token was not
    generated, or is the answer's last.

    supervised (indexed by the predicted token) and documents, both (B, T). Start t drafts from x[t + 1].
    """
    length = supervised.shape[1]
    column = torch.arange(length, device=supervised.device)
    learnt = torch.cat([_has_target(supervised, documents), supervised.new_zeros(len(supervised), 1).bool()], 1)
    ends = torch.where(learnt, length, column).flip(1).cummin(1).values.flip(1)  # the first that is not learnt, from t
    return (ends - column - 1).clamp_min(0)


def tokens_before(supervised: Tensor, documents: Tensor) -> Tensor:
    """(B, T) the output position of a step from each start: how many tokens of its answer come before, that which it
    drafts from included; 0 if that one was not generated. Arguments as of `tokens_left`."""
    column = torch.arange(supervised.shape[1], device=supervised.device)
    learnt = torch.cat([_has_target(supervised, documents), supervised.new_zeros(len(supervised), 1).bool()], 1)
    return column - torch.where(learnt, -1, column).cummax(1).values


def _has_target(supervised: Tensor, documents: Tensor) -> Tensor:
    """(B, T − 1) whether x[t + 1] is supervised, and of the document of x[t]."""
    return supervised[:, 1:].bool() & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
