"""The teacher of a head: the base's law of the next token at any position of a batch, made only where it is asked for.

Shapes: B batch rows, T positions, F features, H hidden, V vocabulary, Vd draft vocabulary, R positions asked for,
X outcomes a law is compared over, K likeliest tokens kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.cache import additive
from specheads.losses import wide
from specheads.target import (
    MASKED_ATTENTION,
    concat_taps,
    decoder_of,
    kept_states,
    layer_reach,
    lm_head_gives_logits,
    logits_of,
    takes_mask_dict,
    text_config,
)


@dataclass(frozen=True, slots=True)
class DraftIds:
    """Which tokens a head can draft: ids (Vd,) the target id of each, place (V,) the reverse, −1 for the others."""

    ids: Tensor
    place: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> DraftIds:
        place = torch.full((vocab_size,), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, place)


class Law(Protocol):
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

    def at(self, rows: Tensor) -> Law:
        """The law of some of the R positions, or of some twice."""
        ...


class Teacher(Protocol):
    """Positions (R,) are indices into the batch laid flat."""

    def law(self, positions: Tensor, draft: DraftIds | None) -> Law:
        """Renormalised over the draft vocabulary, and without gradients."""
        ...


class FullLaw:
    """A law known for every token, from logits (R, V); what nobody asks for is not made."""

    def __init__(self, logits: Tensor, draft: DraftIds | None) -> None:
        self._logits, self._draft = logits, draft

    @cached_property
    def best(self) -> Tensor:
        return likeliest(self._logits)

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        """The logits compared, (R, X), and their log-sum (R, 1)."""
        kept = wide(self._logits if self._draft is None else self._logits.index_select(1, self._draft.ids))
        return kept, kept.logsumexp(-1, keepdim=True)

    @cached_property
    def log_p(self) -> Tensor:
        kept, share = self._kept
        return kept - share

    @cached_property
    def mass(self) -> Tensor:
        share = self._kept[1].squeeze(-1)
        return torch.ones_like(share) if self._draft is None else (share - wide(self._logits).logsumexp(-1)).exp()

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q

    def at(self, rows: Tensor) -> PickedLaw:
        return PickedLaw(self, rows)


@dataclass(frozen=True)
class PickedLaw:
    """The law at some rows of a `FullLaw`; what nobody asks for is not made."""

    whole: FullLaw
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

    def at(self, rows: Tensor) -> PickedLaw:
        return PickedLaw(self.whole, self.rows[rows])


def likeliest(logits: Tensor, block: int = 128) -> Tensor:
    """argmax over the last of (R, V), the first of equals."""
    if logits.device.type != "cpu" or logits.shape[-1] % block:
        return logits.argmax(-1)
    # The largest of each block first: a maximum alone is found several times faster than its place.
    blocks = logits.unflatten(-1, (-1, block))
    which = blocks.amax(-1).argmax(-1)
    return which * block + blocks[torch.arange(len(which)), which].argmax(-1)


class LiveTeacher(ABC):
    """A base that is in memory, whose law can be learnt from and, where it is trained too, differentiated."""

    @abstractmethod
    def rows(self, positions: Tensor) -> Tensor:
        """What the base says at positions (R,), as `project` takes it."""

    @abstractmethod
    def project(self, rows: Tensor) -> Tensor:
        """→ logits (R, V)."""

    @torch.no_grad()
    def logits_at(self, positions: Tensor) -> Tensor:
        return self.project(self.rows(positions))

    def law(self, positions: Tensor, draft: DraftIds | None) -> FullLaw:
        return FullLaw(self.logits_at(positions), draft)


@dataclass(frozen=True, slots=True)
class WholeLogits(LiveTeacher):
    """From the base's own logits (B · T, V), where more stands behind its last hidden state than `logits_of`."""

    logits: Tensor

    def rows(self, positions: Tensor) -> Tensor:
        return self.logits[positions]

    def project(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True, slots=True)
class LastHidden(LiveTeacher):
    """From the base's last hidden states (B · T, H) and its output matrix: no logits but those asked for."""

    hidden: Tensor
    lm_head: Callable[[Tensor], Tensor]

    def rows(self, positions: Tensor) -> Tensor:
        return self.hidden[positions]

    def project(self, rows: Tensor) -> Tensor:
        return self.lm_head(rows)


NEVER = -1e30  # log-chance of what does not happen: finite, since 0 · −∞ is no number


@dataclass(frozen=True, slots=True)
class TopKTailLaw:
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
    def of(cls, ids: Tensor, log_p: Tensor, tail: Tensor, draft: DraftIds | None) -> TopKTailLaw:
        """ids, log_p (R, K), the likeliest first, and tail (R,), the log-chance of all others."""
        places = ids if draft is None else draft.place[ids]
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

    def at(self, rows: Tensor) -> TopKTailLaw:
        return TopKTailLaw(self.best[rows], self.log_p[rows], self.mass[rows], self.places[rows])


@dataclass(frozen=True, slots=True)
class TopKTail:
    """From the K likeliest tokens of each position, the likeliest first: ids, log_p (B · T, K), tail (B · T,)."""

    ids: Tensor
    log_p: Tensor
    tail: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, k: int) -> TopKTail:
        """logits (R, V), of which K = min(k, V) are kept."""
        full = wide(logits)
        total = full.logsumexp(-1)
        kept, ids = full.topk(min(k, full.shape[-1]), dim=-1)
        # Of equally likely tokens topk puts any first; the best is the one that argmax names.
        best = logits.argmax(-1, keepdim=True)
        ids = ids.scatter(-1, (ids == best).long().argmax(-1, keepdim=True), ids[:, :1])
        ids[:, :1] = best
        rest = full.scatter(-1, ids, -torch.inf).logsumexp(-1)
        return cls(ids, kept - total.unsqueeze(-1), (rest - total).clamp_min(NEVER))

    @classmethod
    def of_text(cls, tokens: Tensor) -> TopKTail:
        """The text's own next token as the law, where none was kept: tokens (B, T)."""
        following = tokens.roll(-1, 1).flatten().unsqueeze(-1)
        sure = torch.zeros_like(following, dtype=torch.float32)
        return cls(following, sure, sure.squeeze(-1) + NEVER)

    def law(self, positions: Tensor, draft: DraftIds | None) -> TopKTailLaw:
        return TopKTailLaw.of(self.ids[positions].long(), self.log_p[positions], self.tail[positions], draft)


_remade: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def gives_logits(base: PreTrainedModel) -> bool:
    """`lm_head_gives_logits`, tried once a base."""
    if base not in _remade:
        _remade[base] = lm_head_gives_logits(base)
    return _remade[base]


def packed_mask(base: PreTrainedModel, documents: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """What keeps the documents (B, T) of packed rows from seeing one another, as the base takes it."""
    attention = getattr(text_config(base), "_attn_implementation", None)
    if attention not in MASKED_ATTENTION:
        raise ValueError(
            f"{attention} attention would let the documents of a packed row see one another; train with "
            "packing=false, or attn_implementation=sdpa"
        )
    place = torch.arange(documents.shape[1], device=documents.device)
    seen = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (place <= place.unsqueeze(1))
    masks = {
        name: additive(seen & reach(position_ids.unsqueeze(2), position_ids.unsqueeze(1)), base.dtype)
        for name, reach in layer_reach(text_config(base)).items()
    }
    return masks if takes_mask_dict(base) else next(iter(masks.values()))


def tapped(
    base: Any, input_ids: Tensor, attention_mask: Any, position_ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, LiveTeacher]:
    """One pass of the base over input_ids (B, T): the tapped layers (B, T, F), and its law."""
    remade = gives_logits(base)
    out = (decoder_of(base) if remade else base)(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        output_hidden_states=kept_states(layers),
    )
    features = concat_taps(out.hidden_states, layers, input_ids)
    if not remade:
        return features, WholeLogits(out.logits.flatten(0, 1))
    return features, LastHidden(out.last_hidden_state.flatten(0, 1), lambda hidden: logits_of(base, hidden))
