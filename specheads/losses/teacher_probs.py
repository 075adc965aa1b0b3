"""The base's law of the next token at some positions, as losses compare drafts with it: known for every token, or for
the likeliest.

Shapes: R positions, V vocabulary, Vd draft vocabulary, X outcomes compared, K likeliest tokens kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specheads.decoding.draft_ids import DraftIds
from specheads.decoding.precision import at_least_float32
from specheads.decoding.sampler import likeliest


class TeacherProbs(Protocol):
    """The base's law at R positions. best (R,): its likeliest token; log_p (R, X): over the outcomes compared, one of
    which happens for sure; mass (R,): their chance under the whole vocabulary."""

    @property
    def best(self) -> Tensor: ...
    @property
    def log_p(self) -> Tensor: ...
    @property
    def mass(self) -> Tensor: ...
    def outcomes(self, log_q: Tensor) -> Tensor:
        """The draft's log-law (R, Vd) over the same outcomes: (R, X)."""
        ...

    def at(self, rows: Tensor) -> TeacherProbs:
        """The law of some of the R positions, or of some twice."""
        ...


class DenseTeacherProbs:
    """A law known for every token, from logits (R, V); what nobody asks for is not made."""

    def __init__(self, logits: Tensor, draft: DraftIds | None) -> None:
        self._logits, self._draft = logits, draft

    @cached_property
    def best(self) -> Tensor:
        return likeliest(self._logits)

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        """The logits compared, (R, X), and their log-sum (R, 1)."""
        kept = at_least_float32(self._logits if self._draft is None else self._logits.index_select(1, self._draft.ids))
        return kept, kept.logsumexp(-1, keepdim=True)

    @cached_property
    def log_p(self) -> Tensor:
        kept, share = self._kept
        return kept - share

    @cached_property
    def mass(self) -> Tensor:
        share = self._kept[1].squeeze(-1)
        return (
            torch.ones_like(share)
            if self._draft is None
            else (share - at_least_float32(self._logits).logsumexp(-1)).exp()
        )

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q

    def at(self, rows: Tensor) -> IndexedTeacherProbs:
        return IndexedTeacherProbs(self, rows)


@dataclass(frozen=True)
class IndexedTeacherProbs:
    """The law at some rows of a `DenseTeacherProbs`; what nobody asks for is not made."""

    whole: DenseTeacherProbs
    rows: Tensor

    @cached_property
    def best(self) -> Tensor:
        return self.whole.best[self.rows]

    @cached_property
    def log_p(self) -> Tensor:
        return self.whole.log_p[self.rows]

    @cached_property
    def mass(self) -> Tensor:
        return self.whole.mass[self.rows]

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q

    def at(self, rows: Tensor) -> IndexedTeacherProbs:
        return IndexedTeacherProbs(self.whole, self.rows[rows])


NEVER = -1e30  # log-chance of what does not happen: finite, since 0 · −∞ is no number


@dataclass(frozen=True, slots=True)
class TopKTeacherProbs:
    """A law known for K tokens: X = K + 1 outcomes, each of them and the rest of the draft vocabulary, the tail.

    places (R, K): of the K in the draft vocabulary, −1 outside; those outside never happen. How much of the tail lies
    outside is not known: all of it is taken to lie inside, where the frequent tokens are, unless the K leave nothing
    of the draft vocabulary. So mass is at most too large by the tail, and Σ min(p, q) over the outcomes is no smaller
    than over the tokens.
    """

    best: Tensor
    log_p: Tensor
    mass: Tensor
    places: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_p: Tensor, tail: Tensor, draft: DraftIds | None) -> TopKTeacherProbs:
        """ids, log_p (R, K), the likeliest first, and tail (R,), the log-chance of all others."""
        places = ids if draft is None else draft.index[ids]
        inside = places >= 0
        if draft is not None:
            tail = torch.where(inside.sum(-1) == len(draft.ids), NEVER, tail)
        known = torch.cat([torch.where(inside, log_p, NEVER), tail.unsqueeze(-1)], -1)
        share = known.logsumexp(-1, keepdim=True)
        return cls(ids[:, 0], (known - share).clamp_min(NEVER), share.squeeze(-1).exp(), places)

    def outcomes(self, log_q: Tensor) -> Tensor:
        inside, width = self.places >= 0, log_q.shape[-1]
        kept = torch.where(inside, log_q.gather(-1, self.places.clamp_min(0)), NEVER)
        rest = torch.ones(len(log_q), width + 1, dtype=torch.bool, device=log_q.device)
        rest.scatter_(-1, torch.where(inside, self.places, width), False)
        tail = torch.where(rest[:, :width], log_q, NEVER).logsumexp(-1, keepdim=True)
        return torch.cat([kept, tail], -1)

    def at(self, rows: Tensor) -> TopKTeacherProbs:
        return TopKTeacherProbs(self.best[rows], self.log_p[rows], self.mass[rows], self.places[rows])
