"""The teacher of a head: the base's distribution of the next token, computed only at the positions that need it.

It is known for every token, or only for the likeliest. Shapes: B batch rows, T positions, F tapped features, H hidden,
V vocabulary, Vd draft vocabulary, R requested positions, X outcomes compared, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.sampler import likeliest
from specheads.decoding.tree.draft_logits import DraftIds
from specheads.decoding.verify.hf_base import (
    MASKED_ATTENTION,
    UnsupportedModel,
    decoder_of,
    has_state,
    layer_reach,
    lm_head_gives_logits,
    logits_of,
    takes_mask_dict,
    text_config,
)
from specheads.decoding.verify.masks import additive
from specheads.decoding.verify.model_inputs import forward_arguments
from specheads.decoding.verify.taps import captures_of, last_output_kept, run_tapped

LOG_ZERO = -1e30  # log-probability of an impossible outcome: finite, because 0 · −∞ is NaN


@dataclass(frozen=True, slots=True)
class TeacherProbs:
    """The base's distribution at R positions, with which losses compare drafts.

    best (R,): the likeliest token. log_p (R, X): over the outcomes compared, whose probabilities sum to 1.
    mass (R,): the probability of these outcomes under the whole vocabulary.
    draft_ids: None if each token of the draft vocabulary is an outcome, X = Vd. If only K tokens are known, (R, K)
      their ids in the draft vocabulary, −1 outside, and there are X = K + 1 outcomes: these, and the tail, the rest of
      the draft vocabulary. Tokens outside have probability 0. How much of the tail lies outside is unknown. All of it
      is taken to lie inside, where the frequent tokens are, unless the K tokens include the whole draft vocabulary. So
      mass is too large by at most the tail, and Σ min(p, q) over the outcomes is no smaller than over the tokens.
    """

    best: Tensor
    log_p: Tensor
    mass: Tensor
    draft_ids: Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: Tensor, draft: DraftIds | None, compare: bool = True, mass: bool = True
    ) -> TeacherProbs:
        """logits (R, V). compare=False, mass=False: leave out log_p and mass, or mass alone, which then are empty."""
        best = likeliest(logits)
        if not compare:
            empty = logits.new_empty(len(logits), 0)
            return cls(best, empty, empty)
        compared = at_least_float32(logits if draft is None else logits.index_select(1, draft.ids))
        total = compared.logsumexp(-1, keepdim=True)
        inside = torch.ones_like(total[:, 0])
        if mass and draft is not None:
            inside = (total.squeeze(-1) - at_least_float32(logits).logsumexp(-1)).exp()
        return cls(best, compared - total, inside)

    @classmethod
    def from_top_k(cls, ids: Tensor, log_p: Tensor, tail: Tensor, draft: DraftIds | None) -> TeacherProbs:
        """ids, log_p (R, K), the likeliest first. tail (R,): the log-probability of all other tokens."""
        draft_ids = ids if draft is None else draft.index[ids]
        inside = draft_ids >= 0
        if draft is not None:
            tail = torch.where(inside.sum(-1) == len(draft.ids), LOG_ZERO, tail)
        known = torch.cat([torch.where(inside, log_p, LOG_ZERO), tail.unsqueeze(-1)], -1)
        total = known.logsumexp(-1, keepdim=True)
        return cls(ids[:, 0], (known - total).clamp_min(LOG_ZERO), total.squeeze(-1).exp(), draft_ids)

    def at(self, rows: Tensor | slice) -> TeacherProbs:
        """The distributions at some of the R positions; rows may repeat."""
        ids = None if self.draft_ids is None else self.draft_ids[rows]
        return TeacherProbs(self.best[rows], self.log_p[rows], self.mass[rows], ids)

    def outcomes(self, log_q: Tensor) -> Tensor:
        """The draft's log-probabilities over tokens (R, Vd) → over the same outcomes (R, X)."""
        if self.draft_ids is None:
            return log_q
        inside, width = self.draft_ids >= 0, log_q.shape[-1]
        known = torch.where(inside, log_q.gather(-1, self.draft_ids.clamp_min(0)), LOG_ZERO)
        in_tail = torch.ones(len(log_q), width + 1, dtype=torch.bool, device=log_q.device)
        in_tail.scatter_(-1, torch.where(inside, self.draft_ids, width), False)
        tail = torch.where(in_tail[:, :width], log_q, LOG_ZERO).logsumexp(-1, keepdim=True)
        return torch.cat([known, tail], -1)


class Teacher(Protocol):
    """A source of the base's distributions. Positions (R,) are indices into the flattened batch."""

    def probs(self, positions: Tensor, draft: DraftIds | None, compare: bool = True, mass: bool = True) -> TeacherProbs:
        """The base's distributions, renormalised over the draft vocabulary, without gradients. compare, mass: see
        `TeacherProbs.from_logits`."""
        ...


@dataclass(frozen=True, slots=True)
class LiveTeacher:
    """A base in memory. Its logits are `project(outputs)`, with gradients, for a base that is being trained too.

    outputs (B · T, H): the base's last hidden states, and lm_head its output matrix, so that logits are computed only
    at the requested positions. lm_head None: outputs are the logits (B · T, V) of a base for which `logits_of` cannot
    reproduce them.
    """

    outputs: Tensor
    lm_head: Callable[[Tensor], Tensor] | None

    def project(self, outputs: Tensor) -> Tensor:
        return outputs if self.lm_head is None else self.lm_head(outputs)

    @torch.no_grad()
    def logits_at(self, positions: Tensor) -> Tensor:
        return self.project(self.outputs[positions])

    def probs(self, positions: Tensor, draft: DraftIds | None, compare: bool = True, mass: bool = True) -> TeacherProbs:
        return TeacherProbs.from_logits(self.logits_at(positions), draft, compare, mass)


@dataclass(frozen=True, slots=True)
class TopKTail:
    """From the K likeliest tokens at each position, likeliest first: ids, log_p (B · T, K), and `tail` (B · T,), the
    log-probability of all others."""

    ids: Tensor
    log_p: Tensor
    tail: Tensor

    @classmethod
    @torch.no_grad()
    def from_logits(cls, logits: Tensor, k: int) -> TopKTail:
        """logits (R, V) → the K = min(k, V) likeliest tokens."""
        full = at_least_float32(logits)
        total = full.logsumexp(-1)
        top, ids = full.topk(min(k, full.shape[-1]), dim=-1)
        # On ties topk may put any token first; it must be the one that argmax gives.
        best = likeliest(logits).unsqueeze(-1)
        ids = ids.scatter(-1, (ids == best).long().argmax(-1, keepdim=True), ids[:, :1])
        ids[:, :1] = best
        rest = full.scatter(-1, ids, -torch.inf).logsumexp(-1)
        return cls(ids, top - total.unsqueeze(-1), (rest - total).clamp_min(LOG_ZERO))

    @classmethod
    def from_text(cls, tokens: Tensor) -> TopKTail:
        """Tokens (B, T) → the next token of the text with probability 1, if the base's distribution was not saved."""
        following = tokens.roll(-1, 1).flatten().unsqueeze(-1)
        log_p = torch.zeros_like(following, dtype=torch.float32)
        return cls(following, log_p, log_p.squeeze(-1) + LOG_ZERO)

    def probs(self, positions: Tensor, draft: DraftIds | None, compare: bool = True, mass: bool = True) -> TeacherProbs:
        return TeacherProbs.from_top_k(self.ids[positions].long(), self.log_p[positions], self.tail[positions], draft)


_gives_logits: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def gives_logits(base: PreTrainedModel) -> bool:
    """`lm_head_gives_logits`, tested once for each base."""
    if base not in _gives_logits:
        _gives_logits[base] = lm_head_gives_logits(base)
    return _gives_logits[base]


def packed_mask(base: PreTrainedModel, documents: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """The base's attention mask under which documents (B, T) in packed rows do not see one another."""
    attention = getattr(text_config(base), "_attn_implementation", None)
    if attention not in MASKED_ATTENTION:
        raise ValueError(
            f"{attention} attention would let the documents of a packed row see one another; train with "
            "packing=false, or attn_implementation=sdpa"
        )
    if has_state(base):
        raise ValueError(
            f"the recurrent layers of {type(base).__name__} would carry their state from one document of a packed row "
            "to the next; train with packing=false"
        )
    column = torch.arange(documents.shape[1], device=documents.device)
    seen = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (column <= column.unsqueeze(1))
    masks = {
        name: additive(seen & reach(position_ids.unsqueeze(2), position_ids.unsqueeze(1)), base.dtype)
        for name, reach in layer_reach(text_config(base)).items()
    }
    return masks if takes_mask_dict(base) else next(iter(masks.values()))


def _with_tower(base: Any) -> Any:
    """The part of a base that reads images and gives last hidden states."""
    part = base.base_model
    if part is base or "pixel_values" not in forward_arguments(part):
        raise UnsupportedModel(f"{type(base).__name__}: its part that reads images and text was not found")
    return part


def tap_base(
    base: Any, input_ids: Tensor, attention_mask: Any, position_ids: Tensor, layers: tuple[int, ...],
    images: Mapping[str, Any] | None = None,
) -> tuple[Tensor, LiveTeacher]:  # fmt: skip
    """One pass of the base over input_ids (B, T): its tapped layers (B, T, F), and the teacher.

    images: arguments for its images (`image_arguments`). The base then counts its own positions, which may have three
    parts (mrope)."""
    from_hidden = gives_logits(base)
    part = decoder_of(base) if from_hidden else base
    given: dict[str, Any] = {"position_ids": position_ids}
    if images:
        part = _with_tower(base) if from_hidden else base
        given = dict(images)
    with captures_of(base).installed() if layers else nullcontext(), last_output_kept(base, layers):
        out, features = run_tapped(
            base, part, layers, input_ids,
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **given,
        )  # fmt: skip
    if not from_hidden:
        return features, LiveTeacher(out.logits.flatten(0, 1), None)
    hidden = out.last_hidden_state.flatten(0, 1).to(input_ids.device)
    return features, LiveTeacher(hidden, lambda hidden: logits_of(base, hidden))
