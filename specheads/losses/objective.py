"""The training loss of a head: each draft compared with the base's distribution of the same token, in chunks.

Shapes: R supervised positions, R_s those with draft s, D depths, S drafts of a position, C positions of a chunk, C_s
those with draft s, V vocabulary, Vd draft vocabulary, H hidden. R' starts of decoding steps. See targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.tree.draft_logits import DraftIds
from specheads.losses.chunked import Steps, chunked_sum, rows_of_chunk
from specheads.losses.functions import DISTRIBUTION_LOSSES, HARD, DistributionLoss, overlap, position_weights
from specheads.losses.targets import ENDED, DraftTargets
from specheads.losses.teacher import Teacher
from specheads.losses.teacher_probs import TeacherProbs

Project = Callable[[Tensor, int], Tensor]  # rows of draft s (C_s, H) → draft logits (C_s, Vd)


@dataclass(frozen=True, slots=True)
class Scores:
    """Losses, ranks and overlaps of the drafts of a batch.

    total: Σ of weighted losses. depths (D,): Σ at each depth, without the depth weights.
    ranks (R', D) int64: the rank of the base's token in each draft of a start; −1 outside the draft vocabulary, and
    ENDED where no draft gains anything, as the answer ends. overlaps (R', D) or None: α = Σ min(p, q) of the same
    drafts, 0 where ENDED; alphas (R, S): α by target.
    """

    total: Tensor
    depths: Tensor
    ranks: Tensor
    overlaps: Tensor | None
    alphas: Tensor | None

    def terms(self, denominator: Tensor | float) -> dict[str, Tensor]:
        """The terms that DraftHead.loss reports."""
        terms = {f"loss_depth_{k}": loss / denominator for k, loss in enumerate(self.depths, 1)}
        terms["ranks"] = self.ranks
        if self.overlaps is not None:
            terms["overlaps"] = self.overlaps
        return terms


@dataclass(frozen=True)
class Objective:
    """loss: (name, weight) pairs. depth_weights: one per depth, 0 if its drafts are only scored. pace: the floor of
    D-PACE's weights, or None."""

    loss: tuple[tuple[str, float], ...]
    depth_weights: tuple[float, ...]
    pace: float | None = None

    def __call__(
        self,
        targets: DraftTargets,
        teacher: Teacher,
        rows: Sequence[Tensor],
        project: Project,
        parameters: Sequence[Tensor],
        draft: DraftIds | None,
        *,
        vocab_size: int,
        overlaps: bool = False,
    ) -> Scores:
        """rows: the outputs of each draft s, (R_s, H). parameters: what `project` is differentiable in besides rows."""
        # The base's logits and those of one draft are in memory together.
        chunk = rows_of_chunk(vocab_size + (vocab_size if draft is None else len(draft.ids)), rows[0].device)
        weights = self._weights(targets, rows, project, draft, chunk)
        scorer = _Scorer(self, targets, teacher, project, draft, weights, self._trained(len(rows)), overlaps)
        # Only drafts that decoding gains by are ranked. If nothing else needs the base's distribution, it is computed
        # only for those.
        counted = targets.counted
        needs_teacher = (targets.valid if scorer.needs_probs else counted).any(1).nonzero().squeeze(1)
        scored = [targets.indices_of(s) for s in range(len(rows))]
        ranked = [counted[:, s].nonzero().squeeze(1) for s in range(len(rows))]
        total, (losses, ranks, alphas) = chunked_sum(
            scorer.score_chunk,
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
        )

    @property
    def soft(self) -> list[tuple[DistributionLoss, float]]:
        """The terms that compare drafts with the base's distribution, and their weights."""
        return [(DISTRIBUTION_LOSSES[name], weight) for name, weight in self.loss if name != HARD]

    def losses(self, log_q: Tensor, token: Tensor, p: TeacherProbs | None, draft: DraftIds | None) -> Tensor:
        """(C_s,) the loss of each draft: log_q (C_s, Vd), the target token (C_s,), and the base's distribution."""
        loss = log_q.new_zeros(len(log_q))
        token = in_draft(token, draft)
        if hard := dict(self.loss).get(HARD, 0.0):
            term = -log_q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
            loss = loss + hard * torch.where(token >= 0, term, 0)
        if p is not None and self.soft:
            mapped = p.outcomes(log_q)
            terms = torch.stack([weight * function(mapped, p.log_p) for function, weight in self.soft])
            loss = loss + torch.where(in_draft(p.best, draft) >= 0, terms.sum(0), 0)
        return loss

    def _trained(self, num_drafts: int) -> list[bool]:
        """Which drafts are trained on; the others are only scored. This must not depend on which drafts a batch has:
        gradients are reduced across processes in the order they arrive, so all need gradients of the same parameters.
        """
        trained = [weight > 0 for weight in self.depth_weights]
        return trained if num_drafts == len(trained) else [any(trained)] * num_drafts

    @torch.no_grad()
    def _weights(
        self, targets: DraftTargets, rows: Sequence[Tensor], project: Project, draft: DraftIds | None, chunk: int
    ) -> Tensor:
        """(R, S) the weight of each draft's loss."""
        by_depth = torch.tensor(self.depth_weights, dtype=at_least_float32(rows[0]).dtype, device=rows[0].device)
        weights = targets.weights * by_depth[targets.depths]
        if self.pace is None:
            return weights
        chances = _chances(targets, rows, project, draft, chunk)
        # By start: the weight at depth j is what all deeper drafts of the same start stand to gain. The last depths,
        # which an evaluation only scores, do not count.
        trained = sum(weight > 0 for weight in self.depth_weights)
        by_start = position_weights(targets.scatter_by_start(chances)[:, :trained], self.pace)
        return weights * by_start[targets.starts, targets.depths.clamp_max(trained - 1)]


@dataclass(frozen=True, slots=True)
class _Scorer:
    """What all chunks of a batch share. weights (R, S): of the losses; trained: which drafts are trained on."""

    objective: Objective
    targets: DraftTargets
    teacher: Teacher
    project: Project
    draft: DraftIds | None
    weights: Tensor
    trained: list[bool]
    overlaps: bool

    @property
    def needs_probs(self) -> bool:
        """Whether anything besides ranks needs the base's distribution."""
        return bool(self.objective.soft) or self.overlaps

    def score_chunk(self, span: slice, _: Tensor, needs_teacher: Tensor, *by_draft: Tensor) -> Steps:
        """Yields the weighted loss of each trained draft, and returns losses, ranks and overlaps (C, S).

        needs_teacher: indices of the positions whose teacher probabilities are needed. by_draft: the indices (C_s,) of
        each draft's positions, then those of each that are ranked, then each draft's rows (C_s, H).
        """
        probs = teacher_probs_at(self.teacher, self.targets, needs_teacher, self.draft)
        shape, count = (span.stop - span.start, len(self.trained)), len(self.trained)
        losses, alphas = self.weights.new_zeros(shape), self.weights.new_zeros(shape)
        ranks = torch.full(shape, -1, device=losses.device)
        drafts = zip(by_draft[:count], by_draft[count:-count], by_draft[-count:], strict=True)
        for s, (scored, ranked, rows) in enumerate(drafts):
            with torch.set_grad_enabled(self.trained[s] and torch.is_grad_enabled()):
                logits = at_least_float32(self.project(rows, s))
            best = select_probs(probs, needs_teacher, ranked).best
            ranks[ranked - span.start, s] = self._ranks(logits, scored, ranked, best)
            if not (self.trained[s] or self.overlaps):
                continue
            log_q = logits.log_softmax(-1)
            p = select_probs(probs, needs_teacher, scored) if self.needs_probs else None
            if self.overlaps:
                assert p is not None
                alphas[scored - span.start, s] = _overlaps(log_q, p)
            if self.trained[s]:
                loss = self.objective.losses(log_q, self.targets.tokens[scored], p, self.draft)
                yield (loss * self.weights[scored, s]).sum()
                losses[scored - span.start, s] = loss.detach()
        return losses, ranks, alphas

    @torch.no_grad()
    def _ranks(self, logits: Tensor, scored: Tensor, ranked: Tensor, best: Tensor) -> Tensor:
        """The rank of the base's token at positions `ranked`, a subset of `scored`."""
        if len(ranked) < len(scored):
            logits = logits[torch.searchsorted(scored, ranked)]
        return rank_of(logits, in_draft(best, self.draft))


@torch.no_grad()
def _overlaps(log_q: Tensor, p: TeacherProbs) -> Tensor:
    """(C_s,) α over all tokens: those outside the draft vocabulary count as rejected."""
    return overlap(p.outcomes(log_q), p.log_p + p.mass.log().unsqueeze(1))


def _chances(
    targets: DraftTargets, rows: Sequence[Tensor], project: Project, draft: DraftIds | None, chunk: int
) -> Tensor:
    """(R, S) the probability that each draft gives its target token."""
    tokens = in_draft(targets.tokens, draft)
    scored = [targets.indices_of(s) for s in range(len(rows))]

    def compute(span: slice, _: Tensor, *by_draft: Tensor) -> Steps:
        chances = rows[0].new_zeros(span.stop - span.start, len(rows), dtype=at_least_float32(rows[0]).dtype)
        for s, (indices, hidden) in enumerate(zip(by_draft[: len(rows)], by_draft[len(rows) :], strict=True)):
            q, token = at_least_float32(project(hidden, s)).softmax(-1), tokens[indices]
            chance = q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
            chances[indices - span.start, s] = chance * (token >= 0)
        yield chances.new_zeros(())
        return (chances,)

    every = torch.arange(len(targets.positions), device=rows[0].device)
    _, (chances,) = chunked_sum(compute, [every, *scored, *rows], (), chunk, [*scored, *scored])
    return chances


def teacher_probs_at(teacher: Teacher, targets: DraftTargets, indices: Tensor, draft: DraftIds | None) -> TeacherProbs:
    """The base's distribution at some of the R positions; computed once for a position that occurs several times."""
    positions = targets.positions[indices]
    if targets.num_depths == targets.starts.shape[1]:
        return teacher.probs(positions, draft)
    positions, inverse = positions.unique(return_inverse=True)
    return teacher.probs(positions, draft).at(inverse)


def select_probs(probs: TeacherProbs, indices: Tensor, some: Tensor) -> TeacherProbs:
    """Distributions at the positions `indices` (R,) → those at `some` of them; both ascending."""
    return probs if len(some) == len(indices) else probs.at(torch.searchsorted(indices, some))


def in_draft(tokens: Tensor, draft: DraftIds | None) -> Tensor:
    """Ids of the base → ids of the draft vocabulary, −1 outside."""
    return tokens if draft is None else draft.index[tokens]


def rank_of(logits: Tensor, token: Tensor) -> Tensor:
    """(R, V) logits, (R,) token → (R,) how many tokens are drafted before it; −1 where token is −1.

    On ties the lower id is drafted first, as in argmax.
    """
    score = logits.gather(1, token.clamp_min(0).unsqueeze(1))
    # Comparisons stored as floats sum several times faster than booleans; exact below 2^24 tokens.
    flags = torch.empty_like(logits)
    before = torch.gt(logits, score, out=flags).sum(1).long()
    if logits.device.type != "cpu" or bool((torch.eq(logits, score, out=flags).sum(1) > 1).any()):
        ids = torch.arange(logits.shape[1], device=logits.device)
        before += ((logits == score) & (ids < token.unsqueeze(1))).sum(1)
    return torch.where(token < 0, -1, before)
