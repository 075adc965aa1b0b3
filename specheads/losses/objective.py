"""The training loss of a head: each draft compared with the base's distribution of the same token, in chunks.

Shapes: R supervised positions, R_s those with draft s, D depths, S drafts of a position, C positions of a chunk, C_s
those with draft s, V vocabulary, Vd draft vocabulary, H hidden. R' starts of decoding steps. See targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.tree.draft_logits import DraftIds
from specheads.losses.chunked import Add, chunked_sum, rows_of_chunk
from specheads.losses.functions import DISTRIBUTION_LOSSES, HARD, overlap, parse_loss, position_weights
from specheads.losses.targets import ENDED, DraftTargets
from specheads.losses.teacher import Teacher, TeacherProbs


class Drafts(NamedTuple):
    """Draft logits of a head that is not trained on all that it drafts by, or not on that alone.

    drafted (C_s, Vd): what it drafts by, which is ranked; −inf for a token that it cannot draft. learnt: logits that
    the loss compares with the base, each with its weight. choose: the tokens to choose (C_s,) → a further loss (C_s,),
    for a head that orders the likeliest tokens.
    """

    drafted: Tensor
    learnt: tuple[tuple[Tensor, float], ...]
    choose: Callable[[Tensor], Tensor] | None = None


Project = Callable[[Tensor, int], "Tensor | Drafts"]  # rows of draft s (C_s, H) → draft logits (C_s, Vd)


@dataclass(frozen=True, slots=True)
class Scores:
    """Losses, ranks and overlaps of the drafts of a batch.

    total: Σ of weighted losses. depths (D,): Σ at each depth, without the depth weights.
    ranks (R', D) int64: the rank of the base's token in each draft of a start; −1 outside the draft vocabulary, and
    ENDED where no draft gains anything, as the answer ends. overlaps (R', D) or None: α = Σ min(p, q) of the same
    drafts, 0 where ENDED; alphas (R, S): α by target. choices: Σ of the loss of `Drafts.choose`, not in depths.
    """

    total: Tensor
    depths: Tensor
    ranks: Tensor
    overlaps: Tensor | None
    alphas: Tensor | None
    choices: Tensor

    def terms(self, denominator: Tensor | float) -> dict[str, Tensor]:
        """The terms that DraftHead.loss reports."""
        terms = {f"loss_depth_{k}": loss / denominator for k, loss in enumerate(self.depths, 1)}
        terms["ranks"] = self.ranks
        if self.overlaps is not None:
            terms["overlaps"] = self.overlaps
        return terms


def score_drafts(
    targets: DraftTargets, teacher: Teacher, rows: Sequence[Tensor], project: Project, parameters: Sequence[Tensor],
    draft: DraftIds | None, *, vocab_size: int, loss: str, depth_weights: Sequence[float], pace: float | None = None,
    overlaps: bool = False,
) -> Scores:  # fmt: skip
    """Score drafts against the base.

    rows: the outputs of each draft s, (R_s, H). parameters: what `project` is differentiable in besides rows.
    loss: see `parse_loss`. depth_weights: one per depth, 0 if its drafts are only scored. pace: the floor of D-PACE's
    weights, or None.
    """
    terms = dict(parse_loss(loss))
    hard = terms.pop(HARD, 0.0)
    soft = [(DISTRIBUTION_LOSSES[name], weight) for name, weight in terms.items()]
    compare = bool(soft) or overlaps  # whether anything besides ranks needs the base's distribution
    # Which drafts are trained on; the others are only scored. This must not depend on which drafts a batch has:
    # gradients are reduced across processes in the order they arrive, so all need gradients of the same parameters.
    trained = [weight > 0 for weight in depth_weights]
    if len(rows) != len(trained):
        trained = [any(trained)] * len(rows)
    # The base's logits and those of one draft are in memory together.
    chunk = rows_of_chunk(vocab_size + (vocab_size if draft is None else len(draft.ids)), rows[0].device)
    tokens = in_draft(targets.tokens, draft)
    scored = [targets.indices_of(s) for s in range(len(rows))]
    by_depth = torch.tensor(depth_weights, dtype=at_least_float32(rows[0]).dtype, device=rows[0].device)
    weights = targets.weights * by_depth[targets.depths]  # (R, S)
    if pace is not None:
        chances = draft_chances(tokens, scored, rows, project, chunk)
        # By start: the weight at depth j is what all deeper drafts of the same start stand to gain. The last depths,
        # which an evaluation only scores, do not count.
        depths = sum(weight > 0 for weight in depth_weights)
        by_start = position_weights(targets.scatter_by_start(chances)[:, :depths], pace)
        weights = weights * by_start[targets.starts, targets.depths.clamp_max(depths - 1)]
    # Only ranks of drafts that decoding gains by count. If nothing else needs the base's distribution, it is computed,
    # and drafts are ranked, only there.
    needs_teacher, ranked = targets.valid.any(1).nonzero().squeeze(1), scored
    if not compare:
        counted = targets.counted
        needs_teacher = counted.any(1).nonzero().squeeze(1)
        ranked = [counted[:, s].nonzero().squeeze(1) for s in range(len(rows))]

    def losses_of(log_q: Tensor, token: Tensor, p: TeacherProbs, best: Tensor) -> Tensor:
        """(C_s,) the loss of each draft. A target, or the base's best token, outside the draft vocabulary (−1) is not
        learnt."""
        result = log_q.new_zeros(len(log_q))
        if hard:
            term = -log_q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
            result = result + hard * torch.where(token >= 0, term, 0)
        if soft:
            mapped = p.outcomes(log_q)
            each = torch.stack([weight * function(mapped, p.log_p) for function, weight in soft])
            result = result + torch.where(best >= 0, each.sum(0), 0)
        return result

    def score_chunk(add: Add, span: slice, _: Tensor, needed: Tensor, *by_draft: Tensor) -> tuple[Tensor, ...]:
        """Adds the weighted loss of each trained draft, and returns losses, ranks and overlaps (C, S).

        needed: indices of the positions whose teacher probabilities are needed. by_draft: the indices (C_s,) of each
        draft's positions, then those of each that are ranked, then each draft's rows (C_s, H).
        """
        probs = teacher_probs_at(teacher, targets, needed, draft, compare, overlaps)
        best = in_draft(probs.best, draft)
        shape = span.stop - span.start, len(rows)
        losses, choices, alphas = (weights.new_zeros(shape) for _ in range(3))
        ranks = torch.full(shape, -1, device=losses.device)
        parts = (by_draft[i * len(rows) : (i + 1) * len(rows)] for i in range(3))
        for s, (at, ranked_at, hidden) in enumerate(zip(*parts, strict=True)):
            with torch.set_grad_enabled(trained[s] and torch.is_grad_enabled()):
                drafts = drafts_of(project(hidden, s))
            logits = drafts.drafted
            ranks[ranked_at - span.start, s] = rank_of(
                logits.detach()[index_in(at, ranked_at)], best[index_in(needed, ranked_at)]
            )
            if not (trained[s] or overlaps):
                continue
            here = index_in(needed, at) if compare else slice(None)
            p = probs.at(here)
            log_q = logits.log_softmax(-1)
            if overlaps:  # over all tokens: those outside the draft vocabulary count as rejected
                q = p.outcomes(log_q.detach())
                alphas[at - span.start, s] = overlap(q, p.log_p + p.mass.log().unsqueeze(1))
            if trained[s]:
                loss = log_q.new_zeros(len(log_q))
                for learnt, weight in drafts.learnt:
                    compared = log_q if learnt is logits else learnt.log_softmax(-1)
                    loss = loss + weight * losses_of(compared, tokens[at], p, best[here])
                losses[at - span.start, s] = loss.detach()
                if drafts.choose is not None:  # the base's likeliest token; the text's if only that is learnt
                    label = best[here] if soft else tokens[at]
                    choice = torch.where(label >= 0, drafts.choose(label.clamp_min(0)), 0)
                    loss = loss + choice
                    choices[at - span.start, s] = choice.detach()
                add((loss * weights[at, s]).sum())
        return losses, ranks, alphas, choices

    total, (losses, ranks, alphas, choices) = chunked_sum(
        score_chunk,
        [torch.arange(len(targets.positions), device=rows[0].device), needs_teacher, *scored, *ranked, *rows],
        parameters,
        chunk,
        [needs_teacher, *scored, *ranked, *scored],
    )
    return Scores(
        total,
        targets.scatter_by_start(losses * targets.weights).sum(0),
        targets.scatter_counted(ranks, ENDED),
        targets.scatter_counted(alphas, 0) if overlaps else None,
        alphas if overlaps else None,
        (choices * targets.weights).sum(),
    )


def drafts_of(projected: Tensor | Drafts) -> Drafts:
    """Draft logits in float32 at least; those of a plain head are all that is learnt."""
    if isinstance(projected, Drafts):
        drafted = at_least_float32(projected.drafted)
        learnt = ((drafted if part is projected.drafted else at_least_float32(part), w) for part, w in projected.learnt)
        return projected._replace(drafted=drafted, learnt=tuple(learnt))
    logits = at_least_float32(projected)
    return Drafts(logits, ((logits, 1.0),))


@torch.no_grad()
def draft_chances(
    tokens: Tensor, scored: Sequence[Tensor], rows: Sequence[Tensor], project: Project, chunk: int
) -> Tensor:
    """(R, S) the probability that each draft gives its target token, `tokens` (R,) in the draft vocabulary."""

    def compute(add: Add, span: slice, _: Tensor, *by_draft: Tensor) -> tuple[Tensor, ...]:
        chances = rows[0].new_zeros(span.stop - span.start, len(rows), dtype=at_least_float32(rows[0]).dtype)
        for s, (indices, hidden) in enumerate(zip(by_draft[: len(rows)], by_draft[len(rows) :], strict=True)):
            q, token = drafts_of(project(hidden, s)).drafted.softmax(-1), tokens[indices]
            chance = q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
            chances[indices - span.start, s] = chance * (token >= 0)
        add(chances.new_zeros(()))
        return (chances,)

    every = torch.arange(len(tokens), device=tokens.device)
    _, (chances,) = chunked_sum(compute, [every, *scored, *rows], (), chunk, [*scored, *scored])
    return chances


def teacher_probs_at(
    teacher: Teacher, targets: DraftTargets, indices: Tensor, draft: DraftIds | None, compare: bool, mass: bool
) -> TeacherProbs:
    """The base's distribution at some of the R positions; computed once for a position that occurs several times."""
    positions = targets.positions[indices]
    if targets.num_depths == targets.starts.shape[1]:
        return teacher.probs(positions, draft, compare, mass)
    positions, inverse = positions.unique(return_inverse=True)
    return teacher.probs(positions, draft, compare, mass).at(inverse)


def index_in(indices: Tensor, some: Tensor) -> Tensor | slice:
    """Where `some` of `indices` are, both ascending; a slice if they are all of them, so that nothing is copied."""
    return slice(None) if len(some) == len(indices) else torch.searchsorted(indices, some)


def in_draft(tokens: Tensor, draft: DraftIds | None) -> Tensor:
    """Ids of the base → ids of the draft vocabulary, −1 outside."""
    return tokens if draft is None else draft.index[tokens]


@torch.no_grad()
def rank_of(logits: Tensor, token: Tensor) -> Tensor:
    """(R, V) logits, (R,) token → (R,) how many tokens are drafted before it; −1 where token is −1 or its logit −inf,
    which is never drafted.

    On ties the lower id is drafted first, as in argmax.
    """
    score = logits.gather(1, token.clamp_min(0).unsqueeze(1))
    # Comparisons stored as floats sum several times faster than booleans; exact below 2^24 tokens.
    flags = torch.empty_like(logits)
    before = torch.gt(logits, score, out=flags).sum(1).long()
    if logits.device.type != "cpu" or bool((torch.eq(logits, score, out=flags).sum(1) > 1).any()):
        ids = torch.arange(logits.shape[1], device=logits.device)
        before += ((logits == score) & (ids < token.unsqueeze(1))).sum(1)
    return torch.where((token < 0) | (score.squeeze(1) == -torch.inf), -1, before)
