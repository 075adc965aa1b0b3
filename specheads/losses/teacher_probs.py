"""The base's distribution of the next token at some positions, with which losses compare drafts.

It is known for every token, or only for the likeliest. Shapes: R positions, V vocabulary, Vd draft vocabulary, X
outcomes compared, K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.sampler import likeliest
from specheads.decoding.tree.draft_logits import DraftIds


class TeacherProbs(Protocol):
    """The base's distribution at R positions.

    best (R,): the likeliest token. log_p (R, X): over the outcomes compared, whose probabilities sum to 1.
    mass (R,): the probability of these outcomes under the whole vocabulary.
    """

    @property
    def best(self) -> Tensor: ...
    @property
    def log_p(self) -> Tensor: ...
    @property
    def mass(self) -> Tensor: ...
    def outcomes(self, log_q: Tensor) -> Tensor:
        """The draft's log-probabilities over tokens (R, Vd) → over the same outcomes (R, X)."""
        ...

    def at(self, rows: Tensor) -> TeacherProbs:
        """The distributions at some of the R positions; rows may repeat."""
        ...


class DenseTeacherProbs:
    """A distribution known for every token, from logits (R, V). Each property is computed on first use."""

    def __init__(self, logits: Tensor, draft: DraftIds | None) -> None:
        self._logits, self._draft = logits, draft

    @cached_property
    def best(self) -> Tensor:
        return likeliest(self._logits)

    @cached_property
    def _compared(self) -> tuple[Tensor, Tensor]:
        """The logits compared (R, X), and their logsumexp (R, 1)."""
        logits = self._logits if self._draft is None else self._logits.index_select(1, self._draft.ids)
        logits = at_least_float32(logits)
        return logits, logits.logsumexp(-1, keepdim=True)

    @cached_property
    def log_p(self) -> Tensor:
        logits, total = self._compared
        return logits - total

    @cached_property
    def mass(self) -> Tensor:
        total = self._compared[1].squeeze(-1)
        if self._draft is None:
            return torch.ones_like(total)
        return (total - at_least_float32(self._logits).logsumexp(-1)).exp()

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q

    def at(self, rows: Tensor) -> IndexedTeacherProbs:
        return IndexedTeacherProbs(self, rows)


@dataclass(frozen=True)
class IndexedTeacherProbs:
    """Some rows of a `DenseTeacherProbs`. Each property is computed on first use."""

    dense: DenseTeacherProbs
    rows: Tensor

    @cached_property
    def best(self) -> Tensor:
        return self.dense.best[self.rows]

    @cached_property
    def log_p(self) -> Tensor:
        return self.dense.log_p[self.rows]

    @cached_property
    def mass(self) -> Tensor:
        return self.dense.mass[self.rows]

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q

    def at(self, rows: Tensor) -> IndexedTeacherProbs:
        return IndexedTeacherProbs(self.dense, self.rows[rows])


NEVER = -1e30  # log-probability of an impossible outcome: finite, because 0 · −∞ is NaN


@dataclass(frozen=True, slots=True)
class TopKTeacherProbs:
    """A distribution known for K tokens: X = K + 1 outcomes, these and the tail, the rest of the draft vocabulary.

    draft_ids (R, K): the K tokens' ids in the draft vocabulary, −1 outside; tokens outside have probability 0. How much
    of the tail lies outside is unknown. All of it is taken to lie inside, where the frequent tokens are, unless the K
    tokens include the whole draft vocabulary. So mass is too large by at most the tail, and Σ min(p, q) over the
    outcomes is no smaller than over the tokens.
    """

    best: Tensor
    log_p: Tensor
    mass: Tensor
    draft_ids: Tensor

    @classmethod
    def from_top_k(cls, ids: Tensor, log_p: Tensor, tail: Tensor, draft: DraftIds | None) -> TopKTeacherProbs:
        """ids, log_p (R, K), the likeliest first. tail (R,): the log-probability of all other tokens."""
        draft_ids = ids if draft is None else draft.index[ids]
        inside = draft_ids >= 0
        if draft is not None:
            tail = torch.where(inside.sum(-1) == len(draft.ids), NEVER, tail)
        known = torch.cat([torch.where(inside, log_p, NEVER), tail.unsqueeze(-1)], -1)
        total = known.logsumexp(-1, keepdim=True)
        return cls(ids[:, 0], (known - total).clamp_min(NEVER), total.squeeze(-1).exp(), draft_ids)

    def outcomes(self, log_q: Tensor) -> Tensor:
        inside, width = self.draft_ids >= 0, log_q.shape[-1]
        known = torch.where(inside, log_q.gather(-1, self.draft_ids.clamp_min(0)), NEVER)
        in_tail = torch.ones(len(log_q), width + 1, dtype=torch.bool, device=log_q.device)
        in_tail.scatter_(-1, torch.where(inside, self.draft_ids, width), False)
        tail = torch.where(in_tail[:, :width], log_q, NEVER).logsumexp(-1, keepdim=True)
        return torch.cat([known, tail], -1)

    def at(self, rows: Tensor) -> TopKTeacherProbs:
        return TopKTeacherProbs(self.best[rows], self.log_p[rows], self.mass[rows], self.draft_ids[rows])
