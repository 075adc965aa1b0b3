"""The teacher of a head: the base's law of the next token at any position of a batch, made only where it is asked for.

Shapes: B batch rows, T positions, F features, H hidden, V vocabulary, Vd draft vocabulary, R positions asked for,
X outcomes a law is compared over, K likeliest tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.losses import wide
from specheads.target import concat_taps, decoder_of, kept_states, lm_head_gives_logits, logits_of


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


class Teacher(Protocol):
    def law(self, positions: Tensor, draft: DraftIds | None) -> Law:
        """At positions (R,), as indices into the batch laid flat, renormalised over the draft vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class FullLaw:
    """A law known for every token."""

    best: Tensor
    log_p: Tensor
    mass: Tensor

    @classmethod
    def of(cls, logits: Tensor, draft: DraftIds | None) -> FullLaw:
        kept = wide(logits if draft is None else logits[:, draft.ids])
        share = kept.logsumexp(-1, keepdim=True)
        if draft is None:
            mass = share.new_ones(len(share))
        else:
            mass = (share - wide(logits).logsumexp(-1, keepdim=True)).squeeze(-1).exp()
        return cls(logits.argmax(-1), kept - share, mass)

    def outcomes(self, log_q: Tensor) -> Tensor:
        return log_q


@dataclass(frozen=True, slots=True)
class WholeLogits:
    """From the base's own logits (B · T, V), where more stands behind its last hidden state than `logits_of`."""

    logits: Tensor

    def law(self, positions: Tensor, draft: DraftIds | None) -> FullLaw:
        return FullLaw.of(self.logits[positions], draft)


@dataclass(frozen=True, slots=True)
class LastHidden:
    """From the base's last hidden states (B · T, H) and its output matrix: no logits but those asked for."""

    hidden: Tensor
    lm_head: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def law(self, positions: Tensor, draft: DraftIds | None) -> FullLaw:
        return FullLaw.of(self.lm_head(self.hidden[positions]), draft)


_remade: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def gives_logits(base: PreTrainedModel) -> bool:
    """`lm_head_gives_logits`, tried once a base."""
    if base not in _remade:
        _remade[base] = lm_head_gives_logits(base)
    return _remade[base]


def tapped(
    base: Any, input_ids: Tensor, attention_mask: Any, position_ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, Teacher]:
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
