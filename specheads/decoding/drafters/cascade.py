"""Cascade: drafts that review one another before the target does. The same loop inside propose().

Each neural draft reviews in one cached pass what smaller ones wrote (vertical), and larger drafts write the earlier
tokens, smaller ones the later (horizontal). Shapes: B batch rows, U ids a draft has not read, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.acceptance.tokens import stands_in_review
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.cascade_state import CascadeState
from specheads.decoding.drafters.head_first import HeadReview
from specheads.decoding.drafters.k_matrix import k_matrix_of, most_written
from specheads.decoding.drafters.model import DraftModel, vocabulary_size
from specheads.decoding.drafters.paths import PathDrafter, tree_of
from specheads.decoding.drafters.reader import Reader
from specheads.decoding.planner import Plan, chain
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree


class Cascade:
    """Cascaded drafts, largest first: `DraftModel`s, the first of them perhaps a head, and at the bottom an n-gram
    drafter (without one, the smallest model drafts token by token).

    k_matrix: who writes how many tokens for whom (`quotas`); notation "incremental" or "paper". leniency: where one
    draft reviews another, x stands if it is the reviewer's likeliest, or if p(x) > q(x) / leniency > q(x); the target
    reviews by the rule of generate() alone. What comes out is a point mass, so it is lossless under `Exact`.
    A head is asked for exactly k_matrix[0][0] tokens and keeps an n-gram's where it agrees; the rest of the row is
    handed to the drafts behind it, at no cost of its own. Cascade Speculative Drafting, arXiv:2312.11462.
    """

    def __init__(
        self, drafts: Sequence[Drafter], k_matrix: Any, leniency: float = 1.0, notation: str = "incremental"
    ) -> None:
        """ValueError or TypeError for drafts in the wrong place, a k-matrix that does not fit them, leniency < 1."""
        if not drafts:
            raise ValueError("a cascade needs drafts, for instance Cascade([DraftModel(small), MaxGram()], …)")
        self.drafts = list(drafts)
        for place, draft in enumerate(self.drafts):
            _refuse_misplaced(draft, place, len(self.drafts))
        names = [type(draft).__name__ for draft in self.drafts]
        self.k_matrix = k_matrix_of(k_matrix, names, notation)
        if not (isinstance(leniency, int | float) and 1 <= leniency < math.inf):
            raise ValueError(f"leniency={leniency!r} must be 1 (only the likeliest token stands) or more")
        self.leniency = leniency
        deepest = _num_heads(self.drafts[0])
        if deepest and self.k_matrix[0][0] > deepest:
            raise ValueError(
                f"k_matrix[0][0]={self.k_matrix[0][0]}, but the head guesses {deepest} tokens ahead; ask for {deepest}"
            )
        self.has_head = bool(self.drafts[0].layers)
        self._runs = [draft.num_tokens if isinstance(draft, PathDrafter) else None for draft in self.drafts]
        self.most = sum(self.k_matrix[0]) if self.has_head else most_written(self.k_matrix, self._runs)
        # What a head is to review may reach farther, before it does.
        self._widest = max(self.most, self.k_matrix[0][0] + most_written(self.k_matrix, self._runs, 1))
        self._reviews = [0] * len(self.drafts)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.drafts[0].layers

    @property
    def wants_target_top(self) -> int:
        return getattr(self.drafts[-1], "wants_target_top", 0)

    @property
    def reviews(self) -> tuple[int, ...]:
        """Reviews by each draft since the run began, or since `reset`: a pass of its model each. 0 for n-grams.

        The reading of the prompt is part of the first. A head's are its passes; those of Medusa give all its levels.
        """
        return tuple(self._reviews)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """A chain with room for what is drafted at most."""
        return chain(self.most)

    def reset(self) -> None:
        """Count reviews from 0, and forget the prompts that an n-gram storage has learnt."""
        self._reviews = [0] * len(self.drafts)
        if isinstance(self.drafts[-1], PathDrafter):
            self.drafts[-1].reset()

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        memory = context.memory
        if "cascade" not in memory:
            self._reviews = [0] * len(self.drafts)
            memory["cascade"] = CascadeState.of(context.history, len(self.drafts))
        working: CascadeState = memory["cascade"]
        working.follow(context.history)
        # Of no use is what is drafted in finished rows, or past the length limit.
        room = [context.target.limit - len(row) - 1 for row in context.history]
        most = min(plan.depth, self.most)
        limit = [max(0, min(most, n)) if new else 0 for n, new in zip(room, context.new.tolist(), strict=True)]
        rows = [b for b, n in enumerate(limit) if n]
        step = _Step(self, context, working)
        if not rows:
            return DraftTree.root_only(context.root)
        if self.has_head:
            levels = min(self.k_matrix[0][0], max(limit))
            review = HeadReview(levels, self.most + 1, self.leniency, working, rows, step.write)
            own = replace(context, memory=memory.setdefault("head", {}))
            self.drafts[0].propose(own, sampler, review)
            self._reviews[0] += 1 if _num_heads(self.drafts[0]) else levels
        step.write(0, rows, limit)
        for b, n in enumerate(limit):
            working.cut(b, working.text[b] + n)
        return tree_of(context.root, context.history, [[working.drafted(b)] for b in range(len(limit))], plan)


class _Step:
    """One proposal: the recursion over reviewers. Rows are reviewed together, each with its own lengths and quotas."""

    def __init__(self, cascade: Cascade, context: Context, working: CascadeState) -> None:
        self.cascade, self.working = cascade, working
        self.ngram = replace(context, memory=context.memory.setdefault("ngram", {}))
        self.vocab_size = vocabulary_size(context.target.base)
        self.readers: dict[int, Reader] = context.memory.setdefault("readers", {})
        self.idle = {0} if cascade.has_head else set()  # the columns that write nothing: a head has its own loop
        longest = max(map(len, context.history))
        for column, draft in enumerate(cascade.drafts):
            if not isinstance(draft, DraftModel):
                continue
            if column not in self.readers:
                draft.refuse_other_kind(context)
                draft.refuse_other_vocabulary(self.vocab_size)
                rows = [row[:-1] for row in context.history]
                self.readers[column] = draft.reader(rows, cascade._widest + 1, context.target.limit, context.source)
            if longest > draft.longest:  # a text that outgrows its positions goes on without it
                self.idle.add(column)

    def write(self, reviewer: int, rows: list[int], limit: Sequence[int] | None = None) -> None:
        """Draft in these batch rows what `reviewer` is to review, each row up to its quota.

        reviewer: a row of the k-matrix. limit: of each batch row, how many tokens are of use.
        """
        ids, shares = self.working.ids, self.cascade.k_matrix[reviewer] if reviewer < len(self.cascade.drafts) else ()
        start = list(self.working.text) if reviewer == 0 else [len(row) for row in ids]
        wanted = 0
        for column, share in enumerate(shares):
            wanted += share
            going = rows if share and column not in self.idle else []
            while going := [b for b in going if len(ids[b]) - start[b] < (min(wanted, limit[b]) if limit else wanted)]:
                going = self._contribute(column, going)

    def _contribute(self, column: int, rows: list[int]) -> list[int]:
        """What one draft adds at once; the rows to which it may add more."""
        draft, working = self.cascade.drafts[column], self.working
        if isinstance(draft, PathDrafter):
            found = draft.runs(self.ngram, draft.num_tokens, {b: list(working.ids[b]) for b in rows})
            runs = [own[0] if own else [] for own in found]
            for b, run in zip(rows, runs, strict=True):
                working.add(b, run, [1.0] * len(run))
            return [b for b, run in zip(rows, runs, strict=True) if len(run) == draft.num_tokens]
        start = [len(row) for row in working.ids]
        self.write(column + 1, rows)
        self._review(column, rows, start)
        return rows

    def _review(self, column: int, rows: list[int], start: list[int]) -> None:
        """Keep of each row's ids from `start` on what draft `column` lets stand, and put its own token behind."""
        working, leniency, reader = self.working, self.cascade.leniency, self.readers[column]
        read = working.read[column]
        unread = [ids[held:] if b in rows else [] for b, (ids, held) in enumerate(zip(working.ids, read, strict=True))]
        width = max(map(len, unread))
        fed = torch.tensor([own + [0] * (width - len(own)) for own in unread], device=reader.device)
        count = torch.tensor([len(own) for own in unread], device=reader.device)
        reader.rewind(torch.tensor(read))
        bound = max(held + len(own) for held, own in zip(read, unread, strict=True))
        logits = reader.review(fed, count, bound)[..., : self.vocab_size]
        likeliest, q_likeliest, p = judged(logits, fed, laws=leniency > 1)
        self.cascade._reviews[column] += 1
        for b in rows:
            behind, place = start[b] - 1 - read[b], 0  # the id whose law speaks of the first that was drafted
            drafted = len(working.ids[b]) - start[b]
            q = working.q[b][start[b] - working.text[b] :]
            while place < drafted and stands_in_review(
                likeliest[b][behind + place] == unread[b][behind + place + 1], p[b][behind + place], q[place], leniency
            ):
                place += 1
            working.cut(b, start[b] + place)
            read[b] = start[b] + place
            working.q[b][start[b] - working.text[b] :] = p[b][behind : behind + place]
            working.add(b, [likeliest[b][behind + place]], [q_likeliest[b][behind + place]])


def judged(logits: Tensor, fed: Tensor, *, laws: bool) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """logits (B, U, V) behind ids fed (B, U) → of each, on the host: the likeliest next id, its probability, and that
    of the id fed next. laws: are probabilities wanted? Else they are 0."""
    best, likeliest = logits.max(-1)
    if not laws:
        none = [[0.0] * fed.shape[1]] * len(fed)
        return likeliest.tolist(), none, none
    following = fed.roll(-1, 1)
    known = following < logits.shape[-1]  # an id this draft has no law for has no chance
    own = logits.gather(2, torch.where(known, following, 0).unsqueeze(2)).squeeze(2)
    both = torch.stack([best, own.masked_fill(~known, -torch.inf)]).float()
    q, p = (both - logits.float().logsumexp(-1)).exp().tolist()
    return likeliest.tolist(), q, p


def _num_heads(draft: Any) -> int | None:
    """How many tokens ahead a head guesses in one pass; None for one that goes level by level."""
    return getattr(draft, "fixed_depth", None)


def _refuse_misplaced(draft: Any, place: int, num_drafts: int) -> None:
    name = type(draft).__name__
    if isinstance(draft, PathDrafter):
        if place < num_drafts - 1:
            raise ValueError(
                f"draft {place} ({name}) copies and cannot review; put it last, at the bottom of the cascade"
            )
        if draft.width > 1:
            raise ValueError(f"a cascade drafts chains, but {name} has width={draft.width}; make it width=1")
    elif isinstance(draft, DraftModel):
        if draft.through_text:
            raise ValueError(
                f"draft {place} ({name}) drafts through text; in a cascade all share the target's vocabulary"
            )
    elif not getattr(draft, "layers", ()):
        raise TypeError(
            f"draft {place} ({name}) does not fit into a cascade; give DraftModel(model) for language models, a head "
            "first, and an n-gram drafter last"
        )
    elif place:
        raise ValueError(f"draft {place} ({name}) is a head, which reads the target's features; put it first")
