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

from specheads.chunked import Steps, chunked_sum
from specheads.losses import HARD, LAW_LOSSES, overlap, position_weights, wide
from specheads.teacher import DraftIds, Law, Teacher

Project = Callable[[Tensor, int], Tensor]  # rows of depth s (C, H) → draft logits (C, Vd)


@dataclass(frozen=True, slots=True)
class Asked:
    """The supervised positions of a batch and where their drafts started.

    positions (R,), tokens (R,) the one asked for, starts (R, S) and depths (R, S) of its drafts, weights (R, S): how
    many drafts each stands for, 0 where none of that depth started in the same document. Positions and starts are
    indices into the batch laid flat, of `size` = B · T positions. num_depths: D.
    """

    positions: Tensor
    tokens: Tensor
    starts: Tensor
    depths: Tensor
    weights: Tensor
    size: int
    num_depths: int

    @classmethod
    def of(cls, tokens: Tensor, supervised: Tensor, documents: Tensor, depths: int) -> Asked:
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

    def rows(self, values: Tensor, depth: int) -> Tensor:
        """(B, T, …) by the position where drafts start → (R, …) by the position they speak of."""
        return values.flatten(0, 1)[self.starts[:, depth]]

    def by_start(self, values: Tensor) -> Tensor:
        """(R, S) by the position spoken of → (R', D): one row for each start all of whose D drafts are asked for."""
        filled = self.laid(torch.ones_like(values, dtype=torch.bool))
        return self.laid(values)[filled.all(1)]

    def laid(self, values: Tensor) -> Tensor:
        """(R, S) by the position spoken of → (B · T, D) by start; 0 where no such draft is asked for."""
        count = self.size * self.num_depths
        place = torch.where(self.valid, self.starts * self.num_depths + self.depths, count)
        laid = values.new_zeros(count + 1).scatter(0, place.flatten(), values.flatten())
        return laid[:-1].view(self.size, self.num_depths)


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
        asked: Asked,
        teacher: Teacher,
        rows: Sequence[Tensor],
        project: Project,
        parameters: Sequence[Tensor],
        draft: DraftIds | None,
        *,
        vocab_size: int,
        overlaps: bool = False,
    ) -> Scores:
        """rows: of each of the S drafts (R, H); parameters: what `project` is differentiable in besides them."""
        # The base's logits and those of one draft are there at once.
        chunk = rows_of_chunk(vocab_size + (vocab_size if draft is None else len(draft.ids)), rows[0].device)
        weights = self._weights(asked, rows, project, draft, chunk)
        # The others are only scored. Not by what a batch has rows of: launchers add up the gradients of all processes
        # in the order they come in, and want those of the same parameters from each.
        learns = [weight > 0 for weight in self.depth_weights]
        trained = learns if len(rows) == len(learns) else [any(learns)] * len(rows)
        hard = dict(self.loss).get(HARD, 0.0)
        soft = [(LAW_LOSSES[name], weight) for name, weight in self.loss if name != HARD]

        def scored(here: slice, s: int, chunk: Tensor, law: Law, best: Tensor, token: Tensor) -> tuple[Tensor, ...]:
            """Of one draft: its loss, the rank of `best` and, where it is asked for, α; (C,) each."""
            learnt = trained[s]
            with torch.set_grad_enabled(learnt and torch.is_grad_enabled()):
                logits = wide(project(chunk, s))
                log_q = logits.log_softmax(-1)
            with torch.no_grad():
                rank = rank_of(logits, best)
                # Of the law over the whole vocabulary: what the draft cannot say is rejected.
                alpha = (overlap(law.outcomes(log_q), law.log_p + law.mass.log().unsqueeze(1)),) if overlaps else ()
            loss = torch.zeros_like(weights[here, s])
            if learnt and hard:
                term = -log_q.gather(1, token.clamp_min(0).unsqueeze(1)).squeeze(1)
                loss = loss + hard * torch.where(token >= 0, term, 0)
            if learnt and soft:
                mapped = law.outcomes(log_q)
                terms = torch.stack([weight * function(mapped, law.log_p) for function, weight in soft])
                loss = loss + torch.where(best >= 0, terms.sum(0), 0)
            return loss, rank, *alpha

        def compute(here: slice, *chunks: Tensor) -> Steps:
            law = teacher.law(asked.positions[here], draft)
            best, token = law.best, asked.tokens[here]
            if draft is not None:
                best, token = draft.place[best], draft.place[token]
            found = []
            for s, chunk in enumerate(chunks):
                loss, *more = scored(here, s, chunk, law, best, token)
                yield (loss * weights[here, s]).sum()
                found.append((loss.detach(), *more))
            return tuple(torch.stack(of_drafts, 1) for of_drafts in zip(*found, strict=True))

        total, (losses, ranks, *more) = chunked_sum(compute, rows, parameters, chunk)
        alphas = more[0] if more else None
        depths = asked.laid(losses * asked.weights).sum(0)
        return Scores(total, depths, asked.by_start(ranks), None if alphas is None else asked.by_start(alphas), alphas)

    @torch.no_grad()
    def _weights(
        self, asked: Asked, rows: Sequence[Tensor], project: Project, draft: DraftIds | None, chunk: int
    ) -> Tensor:
        """(R, S) of each draft's loss."""
        of_depth = torch.tensor(self.depth_weights, dtype=wide(rows[0]).dtype, device=rows[0].device)
        weights = asked.weights * of_depth[asked.depths]
        if self.pace is None:
            return weights
        token = asked.tokens if draft is None else draft.place[asked.tokens]

        def chance(here: slice, *chunks: Tensor) -> Steps:
            found = [
                wide(project(chunk, s)).softmax(-1).gather(1, token[here].clamp_min(0).unsqueeze(1)).squeeze(1)
                for s, chunk in enumerate(chunks)
            ]
            yield chunks[0].new_zeros(())
            return (torch.stack(found, 1) * (token[here] >= 0).unsqueeze(1),)

        _, (chances,) = chunked_sum(chance, rows, (), chunk)
        # By start: depth j of a draft weighs what all its deeper ones stand to gain.
        return weights * position_weights(asked.laid(chances), self.pace)[asked.starts, asked.depths]


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
    return max(256, (1 << 21) // width) if device.type == "cpu" else max(512, (1 << 26) // width)
