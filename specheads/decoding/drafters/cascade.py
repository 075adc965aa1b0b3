"""Cascade: drafts that review one another's tokens before the target does, inside propose().

Each model reviews the tokens of smaller ones in one cached pass (vertical cascade). Larger drafts write the earlier
tokens and smaller ones the later (horizontal cascade). Shapes: B batch rows, U ids a draft has not read, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.acceptance.tokens import accepted_in_review
from specheads.decoding.drafters.base import Context, Drafter, with_defaults
from specheads.decoding.drafters.cached_model import CachedModel
from specheads.decoding.drafters.cascade_state import CascadeState, HeadReview
from specheads.decoding.drafters.k_matrix import most_written, parse_k_matrix
from specheads.decoding.drafters.model import DraftModel
from specheads.decoding.drafters.path_drafter import PathDrafter, build_tree
from specheads.decoding.planner import NoDraft, Plan, chain
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


class Cascade(Drafter):
    """Drafts in a cascade, largest first: `DraftModel`s, or a head in the first position, and an n-gram drafter last
    (without one, the smallest model drafts token by token).

    k_matrix: how many tokens each draft writes for each reviewer (k_matrix.py); notation: "incremental" or "paper".
    leniency: a draft that reviews another accepts x if x is its own likeliest token, or, where leniency > 1, if
    p(x) > q(x) / leniency. The target reviews by generate()'s acceptance rule alone. The result is a point mass, so it
    is lossless under `Exact`. A head drafts exactly k_matrix[0][0] tokens, and accepts an n-gram's where it agrees;
    the other drafts write the rest of the row, at no cost to the head. Cascade Speculative Drafting, arXiv:2312.11462.
    """

    def __init__(
        self, drafts: Sequence[Drafter], k_matrix: Any, leniency: float = 1.0, notation: str = "incremental"
    ) -> None:
        """ValueError or TypeError for drafts in the wrong order, a k-matrix that does not fit them, or leniency < 1."""
        if not isinstance(drafts, Sequence) or not drafts:
            raise ValueError("a cascade needs drafts, for instance Cascade([DraftModel(small), MaxGram()], …)")
        for index, draft in enumerate(drafts):
            _refuse_misplaced(draft, index, len(drafts))
        self.drafts = list(map(with_defaults, drafts))
        names = [type(draft).__name__ for draft in drafts]
        self.k_matrix = parse_k_matrix(k_matrix, names, notation)
        if not (isinstance(leniency, int | float) and 1 <= leniency < math.inf):
            raise ValueError(f"leniency={leniency!r} must be 1 (accept only the likeliest token) or more")
        self.leniency = leniency
        deepest = self.drafts[0].fixed_depth
        if deepest and self.k_matrix[0][0] > deepest:
            raise ValueError(
                f"k_matrix[0][0]={self.k_matrix[0][0]}, but the head drafts at most {deepest} tokens ahead; give at "
                f"most {deepest}"
            )
        self.has_head = bool(self.drafts[0].layers)
        self._path_lengths = [draft.num_tokens if isinstance(draft, PathDrafter) else None for draft in self.drafts]
        self.most = sum(self.k_matrix[0]) if self.has_head else most_written(self.k_matrix, self._path_lengths)
        # Before a head reviews, there may be more tokens than it accepts.
        self._widest = max(self.most, self.k_matrix[0][0] + most_written(self.k_matrix, self._path_lengths, 1))
        self._reviews = [0] * len(self.drafts)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.drafts[0].layers

    @property
    def gives_draft_probs(self) -> bool:
        return False

    @property
    def wants_target_top(self) -> int:
        return self.drafts[-1].wants_target_top

    @property
    def reviews(self) -> tuple[int, ...]:
        """Reviews by each draft since generation began or since `reset`, one pass of its model each; 0 for n-grams.

        The first includes the prompt. For a head these are its passes, of which Medusa needs one for all levels.
        """
        return tuple(self._reviews)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """A chain as long as the longest draft."""
        return chain(self.most)

    def reset(self) -> None:
        """Reset the count of reviews, and forget the prompts that an n-gram storage has learned."""
        self._reviews = [0] * len(self.drafts)
        if isinstance(self.drafts[-1], PathDrafter):
            self.drafts[-1].reset()

    @property
    def refillable(self) -> bool:
        return all(draft.refillable for draft in self.drafts)

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for draft in self.drafts for module in draft.draft_modules)

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        memory, index = context.memory, torch.tensor(rows)
        state: CascadeState = memory["cascade"]
        state.replace_rows(rows, prompts.history)
        read = _Proposal(self, prompts, state).models  # the new prompts, without their roots
        for column, model in memory["cached_models"].items():
            model.replace_rows(index, read[column], read[column].target.cache.lengths)
        for part, draft in (("head", self.drafts[0]), ("ngram", self.drafts[-1])):
            if memory.get(part):
                draft.refill(replace(context, memory=memory[part]), rows, replace(prompts, memory={}), plan)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        memory = context.memory
        if "cascade" not in memory:
            self._reviews = [0] * len(self.drafts)
            memory["cascade"] = CascadeState.of(context.history, len(self.drafts))
        state: CascadeState = memory["cascade"]
        state.follow(context.history)
        # Nothing is drafted in finished rows, or past the length limit.
        room = [context.target.limit - len(row) - 1 for row in context.history]
        most = min(plan.depth, self.most)
        limit = [max(0, min(most, n)) if new else 0 for n, new in zip(room, context.new.tolist(), strict=True)]
        rows = [b for b, n in enumerate(limit) if n]
        proposal = _Proposal(self, context, state)
        head_context = replace(context, memory=memory.setdefault("head", {}))
        if not rows:
            if self.has_head:  # it still reads the text
                self.drafts[0].propose(head_context, sampler, NoDraft(ReserveSlots(plan, self.most + 1)))
            return DraftTree.root_only(context.root)
        if self.has_head:
            levels = min(self.k_matrix[0][0], max(limit))
            review = HeadReview(levels, self.most + 1, self.leniency, state, rows, proposal.write)
            self.drafts[0].propose(head_context, sampler, review)
            self._reviews[0] += 1 if self.drafts[0].fixed_depth else levels
        proposal.write(0, rows, limit)
        for b, n in enumerate(limit):
            state.cut(b, state.text[b] + n)
        return build_tree(context.root, context.history, [[state.drafted(b)] for b in range(len(limit))], plan)


class _Proposal:
    """One proposal: the recursion over reviewers. Rows are reviewed as a batch, each with its own length and limit."""

    def __init__(self, cascade: Cascade, context: Context, state: CascadeState) -> None:
        self.cascade, self.state = cascade, state
        self.ngram = replace(context, memory=context.memory.setdefault("ngram", {}))
        self.vocab_size = context.target.vocab_size
        self.models: dict[int, CachedModel] = context.memory.setdefault("cached_models", {})
        self.idle = {0} if cascade.has_head else set()  # columns that write nothing here; a head writes in `HeadReview`
        longest = max(map(len, context.history))
        for column, draft in enumerate(cascade.drafts):
            if not isinstance(draft, DraftModel):
                continue
            if column not in self.models:
                draft.refuse_other_kind(context)
                draft.refuse_other_vocabulary(self.vocab_size)
                rows = [row[:-1] for row in context.history]
                self.models[column] = draft.cached(rows, cascade._widest + 1, context.target.limit, context.source)
            if longest > draft.longest:  # a text that outgrows this model's positions continues without it
                self.idle.add(column)

    def write(self, reviewer: int, rows: list[int], limit: Sequence[int] | None = None) -> None:
        """Draft the tokens that `reviewer` is to review in these batch rows.

        reviewer: a row of the k-matrix. limit: the most useful tokens of each batch row.
        """
        ids, shares = self.state.ids, self.cascade.k_matrix[reviewer] if reviewer < len(self.cascade.drafts) else ()
        start = list(self.state.text) if reviewer == 0 else [len(row) for row in ids]
        wanted = 0
        for column, share in enumerate(shares):
            wanted += share
            going = rows if share and column not in self.idle else []
            while going := [b for b in going if len(ids[b]) - start[b] < (min(wanted, limit[b]) if limit else wanted)]:
                going = self._contribute(column, going)

    def _contribute(self, column: int, rows: list[int]) -> list[int]:
        """Add one draft's next contribution → the rows to which it may add more."""
        draft, state = self.cascade.drafts[column], self.state
        if isinstance(draft, PathDrafter):
            found = draft.paths(self.ngram, draft.num_tokens, {b: list(state.ids[b]) for b in rows})
            paths = [row_paths[0] if row_paths else [] for row_paths in found]
            for b, path in zip(rows, paths, strict=True):
                state.add(b, path, [1.0] * len(path))
            return [b for b, path in zip(rows, paths, strict=True) if len(path) == draft.num_tokens]
        start = [len(row) for row in state.ids]
        self.write(column + 1, rows)
        self._review(column, rows, start)
        return rows

    def _review(self, column: int, rows: list[int], start: list[int]) -> None:
        """Cut each row's ids from `start` on to those that draft `column` accepts, and append its own next token."""
        state, leniency, model = self.state, self.cascade.leniency, self.models[column]
        read = state.read[column]
        unread = [ids[known:] if b in rows else [] for b, (ids, known) in enumerate(zip(state.ids, read, strict=True))]
        width = max(map(len, unread))
        fed = torch.tensor([ids + [0] * (width - len(ids)) for ids in unread], device=model.device)
        count = torch.tensor([len(ids) for ids in unread], device=model.device)
        model.rewind(torch.tensor(read))
        bound = max(known + len(ids) for known, ids in zip(read, unread, strict=True))
        logits = model.review(fed, count, bound)[..., : self.vocab_size]
        likeliest, p_likeliest, p = review_probs(logits, fed, with_probs=leniency > 1)
        self.cascade._reviews[column] += 1
        for b in rows:
            first = start[b] - 1 - read[b]  # the index in `fed` of the id before the first drafted one
            drafted, accepted = len(state.ids[b]) - start[b], 0
            q = state.q[b][start[b] - state.text[b] :]
            while accepted < drafted and accepted_in_review(
                likeliest[b][first + accepted] == unread[b][first + accepted + 1],
                p[b][first + accepted],
                q[accepted],
                leniency,
            ):
                accepted += 1
            state.cut(b, start[b] + accepted)
            read[b] = start[b] + accepted
            state.q[b][start[b] - state.text[b] :] = p[b][first : first + accepted]
            state.add(b, [likeliest[b][first + accepted]], [p_likeliest[b][first + accepted]])


def review_probs(
    logits: Tensor, fed: Tensor, *, with_probs: bool
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """logits (B, U, V) after the ids fed (B, U) → per id, on the host: the likeliest next id, its probability, and the
    probability of the id fed next. Without with_probs both probabilities are 0."""
    best, likeliest = logits.max(-1)
    if not with_probs:
        zeros = [[0.0] * fed.shape[1]] * len(fed)
        return likeliest.tolist(), zeros, zeros
    following = fed.roll(-1, 1)
    known = following < logits.shape[-1]  # an id outside this draft's vocabulary has probability 0
    following_logits = logits.gather(2, torch.where(known, following, 0).unsqueeze(2)).squeeze(2)
    both = torch.stack([best, following_logits.masked_fill(~known, -torch.inf)]).float()
    p_likeliest, p_following = (both - logits.float().logsumexp(-1)).exp().tolist()
    return likeliest.tolist(), p_likeliest, p_following


def _refuse_misplaced(draft: Any, index: int, num_drafts: int) -> None:
    name = type(draft).__name__
    if isinstance(draft, PathDrafter):
        if index < num_drafts - 1:
            raise ValueError(f"draft {index} ({name}) copies and cannot review; put it last in the cascade")
        if draft.width > 1:
            raise ValueError(f"a cascade drafts chains, but {name} has width={draft.width}; make it width=1")
    elif isinstance(draft, DraftModel):
        if draft.through_text:
            raise ValueError(
                f"draft {index} ({name}) drafts through text, but in a cascade all drafts share the target's "
                "vocabulary; leave it out"
            )
        draft.refuse_state("a cascade")
    elif not hasattr(draft, "propose") or not draft.layers:
        raise TypeError(
            f"draft {index} ({name}) cannot be part of a cascade; give DraftModel(model) for language models, a head "
            "first, and an n-gram drafter last"
        )
    elif index:
        raise ValueError(f"draft {index} ({name}) is a head, which reads the target's features; put it first")
