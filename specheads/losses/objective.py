"""What a head is trained on: every draft against the law of the base for the same token, in chunks of positions.

A position u of a text asks for the token behind it, x[u+1]. The draft of it at depth s (0 the first) started at
position u − 1 − s, where the head had seen the text up to and with the token behind that.
Shapes: B batch rows, T positions, R supervised positions, D depths, S drafts of a position, C positions of a chunk,
V vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.draft_ids import DraftIds
from specheads.decoding.precision import at_least_float32
from specheads.losses.chunked import Steps, chunked_sum
from specheads.losses.functions import DISTRIBUTION_LOSSES, HARD, DistributionLoss, overlap, position_weights
from specheads.losses.teacher import Teacher
from specheads.losses.teacher_probs import TeacherProbs

Project = Callable[[Tensor, int], Tensor]  # rows of depth s (C, H) → draft logits (C, Vd)


@dataclass(frozen=True, slots=True)
class DraftTargets:
    """The supervised positions of a batch and where their drafts started.

    positions (R,), tokens (R,) the one asked for, starts (R, S) and depths (R, S) of its drafts, weights (R, S): how
    many drafts each stands for, 0 where none of that depth started in the same document, or it was not drawn. Positions
    and starts are indices into the batch laid flat, of `size` = B · T positions. num_depths: D.
    """

    positions: Tensor
    tokens: Tensor
    starts: Tensor
    depths: Tensor
    weights: Tensor
    size: int
    num_depths: int

    @classmethod
    def of(cls, tokens: Tensor, supervised: Tensor, documents: Tensor, depths: int) -> DraftTargets:
        """A position's drafts of every depth, S = D. tokens, supervised (by the token that is predicted) and documents
        (B, T); document 0 is padding."""
        batch, length = tokens.shape
        asked = supervised[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        row, column = asked.nonzero(as_tuple=True)
        depth = torch.arange(depths, device=tokens.device).expand(len(row), -1)
        back = column.unsqueeze(1) - 1 - depth  # (R, S)
        same = documents[row.unsqueeze(1), back.clamp_min(0)] == documents[row, column].unsqueeze(1)
        starts = row.unsqueeze(1) * length + back.clamp_min(0)
        weights = (same & (back >= 0)).float()
        return cls(row * length + column, tokens[row, column + 1], starts, depth, weights, batch * length, depths)

    @property
    def valid(self) -> Tensor:
        """(R, S) is there such a draft?"""
        return self.weights > 0

    def places(self, draft: int) -> Tensor:
        """(R_s,) of which positions there is draft s, ascending."""
        return self.valid[:, draft].nonzero().squeeze(1)

    def starts_of(self, draft: int) -> Tensor:
        """(R_s,) where they started."""
        return self.starts[self.valid[:, draft], draft]

    def rows(self, values: Tensor, draft: int) -> Tensor:
        """(B, T, …) by the position where drafts start → (R_s, …) of draft s, by the position spoken of."""
        return values.flatten(0, 1)[self.starts_of(draft)]

    @property
    def whole(self) -> Tensor:
        """(R, S) of a start all of whose D drafts are asked for?"""
        filled = self.scatter_by_start(self.valid).all(1)
        return filled[self.starts] & self.valid

    def by_start(self, values: Tensor) -> Tensor:
        """(R, S) by the position spoken of → (R', D): one row for each start all of whose D drafts are asked for."""
        return self.scatter_by_start(values)[self.scatter_by_start(self.valid).all(1)]

    def scatter_by_start(self, values: Tensor) -> Tensor:
        """(R, S) by the position spoken of → (B · T, D) by start; 0 where no such draft is asked for."""
        count = self.size * self.num_depths
        place = torch.where(self.valid, self.starts * self.num_depths + self.depths, count)
        scatter_by_start = values.new_zeros(count + 1).scatter(0, place.flatten(), values.flatten())
        return scatter_by_start[:-1].view(self.size, self.num_depths)


@dataclass(frozen=True, slots=True)
class Scores:
    """total: Σ of weighted losses; depths (D,): Σ of each without the weights of depths; ranks (R', D) int64 and
    overlaps (R', D), or None: of each start, the rank of the base's token in each draft (−1 outside the draft
    vocabulary) and α = Σ min(p, q); alphas (R, S): the same α by the position asked for."""

    total: Tensor
    depths: Tensor
    ranks: Tensor
    overlaps: Tensor | None
    alphas: Tensor | None

    def terms(self, denominator: Tensor | float) -> dict[str, Tensor]:
        """What DraftHead.loss reports of them."""
        terms = {f"loss_depth_{k}": loss / denominator for k, loss in enumerate(self.depths, 1)}
        terms["ranks"] = self.ranks
        if self.overlaps is not None:
            terms["overlaps"] = self.overlaps
        return terms


@dataclass(frozen=True)
class Objective:
    """loss: (name, weight) pairs; depth_weights: of each depth, 0 for one that is only scored; pace: the floor of
    D-PACE's weights, or None."""

    loss: tuple[tuple[str, float], ...]
    depth_weights: tuple[float, ...]
    pace: float | None = None

    def __call__(
        self,
        asked: DraftTargets,
        teacher: Teacher,
        rows: Sequence[Tensor],
        project: Project,
        parameters: Sequence[Tensor],
        draft: DraftIds | None,
        *,
        vocab_size: int,
        overlaps: bool = False,
    ) -> Scores:
        """rows: of each draft s (R_s, H); parameters: what `project` is differentiable in besides them."""
        # The base's logits and those of one draft are there at once.
        chunk = rows_of_chunk(vocab_size + (vocab_size if draft is None else len(draft.ids)), rows[0].device)
        weights = self._weights(asked, rows, project, draft, chunk)
        # The others are only scored. Not by what a batch has rows of: launchers add up the gradients of all processes
        # in the order they come in, and want those of the same parameters from each.
        learns = [weight > 0 for weight in self.depth_weights]
        trained = learns if len(rows) == len(learns) else [any(learns)] * len(rows)
        soft = [(DISTRIBUTION_LOSSES[name], weight) for name, weight in self.loss if name != HARD]
        # Ranks are of starts with all their drafts; where nothing else needs the base's law, it is made for them alone.
        whole = asked.whole
        needs_teacher = (asked.valid if soft or overlaps else whole).any(1).nonzero().squeeze(1)
        places = [asked.places(s) for s in range(len(rows))]
        ranked = [whole[:, s].nonzero().squeeze(1) for s in range(len(rows))]

        def compute(here: slice, _: Tensor, needs_teacher: Tensor, *given: Tensor) -> Steps:
            law = teacher_probs_at(teacher, asked, needs_teacher, draft)
            size, count = here.stop - here.start, len(rows)
            losses, alphas = weights.new_zeros(size, count), weights.new_zeros(size, count)
            ranks = torch.full((size, count), -1, device=losses.device)
            drafts = zip(given[:count], given[count:-count], given[-count:], strict=True)
            for s, (place, ranked, chunk) in enumerate(drafts):
                graded = trained[s] and torch.is_grad_enabled()
                with torch.set_grad_enabled(graded):
                    logits = at_least_float32(project(chunk, s))
                with torch.no_grad():
                    asked_for = logits if len(ranked) == len(place) else logits[torch.searchsorted(place, ranked)]
                    best = in_draft(part_of(law, needs_teacher, ranked).best, draft)
                    ranks[ranked - here.start, s] = rank_of(asked_for, best)
                if not trained[s] and not overlaps:
                    continue
                with torch.set_grad_enabled(graded):
                    log_q = logits.log_softmax(-1)
                own = part_of(law, needs_teacher, place) if soft or overlaps else None
                if overlaps:
                    assert own is not None
                    with torch.no_grad():  # of the law over all tokens: what the draft cannot say is rejected
                        alpha = overlap(own.outcomes(log_q), own.log_p + own.mass.log().unsqueeze(1))
                    alphas[place - here.start, s] = alpha
                if trained[s]:
                    loss = self._losses(log_q, in_draft(asked.tokens[place], draft), own, soft, draft)
                    yield (loss * weights[place, s]).sum()
                    losses[place - here.start, s] = loss.detach()
            return losses, ranks, alphas

        everything = torch.arange(len(asked.positions), device=rows[0].device)
        total, (losses, ranks, alphas) = chunked_sum(
            compute,
            [everything, needs_teacher, *places, *ranked, *rows],
            parameters,
            chunk,
            [needs_teacher, *places, *ranked, *places],
        )
        depths = asked.scatter_by_start(losses * asked.weights).sum(0)
        found = asked.by_start(alphas) if overlaps else None
        return Scores(total, depths, asked.by_start(ranks), found, alphas if overlaps else None)

    def _losses(
        self, log_q: Tensor, token: Tensor, law: TeacherProbs | None, soft: Sequence[tuple[DistributionLoss, float]],
        draft: DraftIds | None,
    ) -> Tensor:  # fmt: skip
        """(C,) of drafts log_q (C, Vd), of the text's tokens (C,), −1 outside the draft vocabulary, and the law."""
        loss = log_q.new_zeros(len(log_q))
        if hard := dict(self.loss).get(HARD, 0.0):
            term = -log_q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
            loss = loss + hard * torch.where(token >= 0, term, 0)
        if law is not None and soft:
            mapped = law.outcomes(log_q)
            terms = torch.stack([weight * function(mapped, law.log_p) for function, weight in soft])
            loss = loss + torch.where(in_draft(law.best, draft) >= 0, terms.sum(0), 0)
        return loss

    @torch.no_grad()
    def _weights(
        self, asked: DraftTargets, rows: Sequence[Tensor], project: Project, draft: DraftIds | None, chunk: int
    ) -> Tensor:
        """(R, S) of each draft's loss."""
        of_depth = torch.tensor(self.depth_weights, dtype=at_least_float32(rows[0]).dtype, device=rows[0].device)
        weights = asked.weights * of_depth[asked.depths]
        if self.pace is None:
            return weights
        token = in_draft(asked.tokens, draft)
        places = [asked.places(s) for s in range(len(rows))]

        def chance(here: slice, _: Tensor, *given: Tensor) -> Steps:
            found = weights.new_zeros(here.stop - here.start, len(rows))
            for s, (place, chunk) in enumerate(zip(given[: len(rows)], given[len(rows) :], strict=True)):
                own = token[place]
                chances = (
                    at_least_float32(project(chunk, s)).softmax(-1).gather(1, own.clamp_min(0).unsqueeze(1)).squeeze(1)
                )
                found[place - here.start, s] = chances * (own >= 0)
            yield weights.new_zeros(())
            return (found,)

        everything = torch.arange(len(asked.positions), device=rows[0].device)
        _, (chances,) = chunked_sum(chance, [everything, *places, *rows], (), chunk, [*places, *places])
        # By start: depth j of a draft weighs what all its deeper ones stand to gain.
        return weights * position_weights(asked.scatter_by_start(chances), self.pace)[asked.starts, asked.depths]


def teacher_probs_at(teacher: Teacher, asked: DraftTargets, rows: Tensor, draft: DraftIds | None) -> TeacherProbs:
    """The base's law at some of the R positions; one that several rows ask for is looked at once."""
    positions = asked.positions[rows]
    if asked.num_depths == asked.starts.shape[1]:
        return teacher.probs(positions, draft)
    positions, place = positions.unique(return_inverse=True)
    return teacher.probs(positions, draft).at(place)


def part_of(law: TeacherProbs, rows: Tensor, some: Tensor) -> TeacherProbs:
    """Of the law at rows (R,) that at some of them, both ascending."""
    return law if len(some) == len(rows) else law.at(torch.searchsorted(rows, some))


def in_draft(tokens: Tensor, draft: DraftIds | None) -> Tensor:
    """Ids of the base → of the draft vocabulary, −1 outside."""
    return tokens if draft is None else draft.index[tokens]


def rank_of(logits: Tensor, token: Tensor) -> Tensor:
    """(R, V) logits, (R,) token → (R,) how many tokens are drafted before it, of equally likely ones those of a lower
    id, as argmax has it; −1 where token is −1."""
    own = logits.gather(1, token.clamp_min(0).unsqueeze(1))
    # Comparisons written as floats are summed several times faster than booleans; exact below 2^24 tokens.
    flags = torch.empty_like(logits)
    before = torch.gt(logits, own, out=flags).sum(1).long()
    if logits.device.type != "cpu" or bool((torch.eq(logits, own, out=flags).sum(1) > 1).any()):
        ids = torch.arange(logits.shape[1], device=logits.device)
        before += ((logits == own) & (ids < token.unsqueeze(1))).sum(1)
    return torch.where(token < 0, -1, before)


def rows_of_chunk(width: int, device: torch.device) -> int:
    """Rows whose logits over `width` tokens are worked on at once: as fit a CPU's cache or a small share of a GPU's
    memory, but enough that the gradient of the output matrix, added up once a chunk, is not what takes the time."""
    return max(256, (1 << 22) // width) if device.type == "cpu" else max(512, (1 << 26) // width)
