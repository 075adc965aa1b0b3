"""The teacher of a head: the base's distribution of the next token, computed only at the positions that need it.

Shapes: B batch rows, T positions, F tapped features, H hidden, V vocabulary, R requested positions, K likeliest tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
    decoder_of,
    has_state,
    layer_reach,
    lm_head_gives_logits,
    logits_of,
    takes_mask_dict,
    text_config,
)
from specheads.decoding.verify.masks import additive
from specheads.decoding.verify.taps import captures_of, last_output_kept, run_tapped
from specheads.losses.teacher_probs import NEVER, DenseTeacherProbs, TeacherProbs, TopKTeacherProbs


class Teacher(Protocol):
    """A source of the base's distributions. Positions (R,) are indices into the flattened batch."""

    def probs(self, positions: Tensor, draft: DraftIds | None) -> TeacherProbs:
        """The base's distributions, renormalised over the draft vocabulary, without gradients."""
        ...


class LiveTeacher(ABC):
    """A base in memory. `project(rows(positions))` has gradients, for a base that is being trained too."""

    @abstractmethod
    def rows(self, positions: Tensor) -> Tensor:
        """The base's outputs at positions (R,), the input of `project`."""

    @abstractmethod
    def project(self, rows: Tensor) -> Tensor:
        """Rows → logits (R, V)."""

    @torch.no_grad()
    def logits_at(self, positions: Tensor) -> Tensor:
        return self.project(self.rows(positions))

    def probs(self, positions: Tensor, draft: DraftIds | None) -> DenseTeacherProbs:
        return DenseTeacherProbs(self.logits_at(positions), draft)


@dataclass(frozen=True, slots=True)
class WholeLogits(LiveTeacher):
    """From the base's own logits (B · T, V), for a base whose logits `logits_of` cannot reproduce."""

    logits: Tensor

    def rows(self, positions: Tensor) -> Tensor:
        return self.logits[positions]

    def project(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True, slots=True)
class LastHidden(LiveTeacher):
    """From the base's last hidden states (B · T, H) and its output matrix: logits only at the requested positions."""

    hidden: Tensor
    lm_head: Callable[[Tensor], Tensor]

    def rows(self, positions: Tensor) -> Tensor:
        return self.hidden[positions]

    def project(self, rows: Tensor) -> Tensor:
        return self.lm_head(rows)


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
        return cls(ids, top - total.unsqueeze(-1), (rest - total).clamp_min(NEVER))

    @classmethod
    def from_text(cls, tokens: Tensor) -> TopKTail:
        """Tokens (B, T) → the next token of the text with probability 1, if the base's distribution was not saved."""
        following = tokens.roll(-1, 1).flatten().unsqueeze(-1)
        log_p = torch.zeros_like(following, dtype=torch.float32)
        return cls(following, log_p, log_p.squeeze(-1) + NEVER)

    def probs(self, positions: Tensor, draft: DraftIds | None) -> TopKTeacherProbs:
        ids, log_p, tail = (values[positions] for values in (self.ids, self.log_p, self.tail))
        return TopKTeacherProbs.from_top_k(ids.long(), log_p, tail, draft)


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


def tap_base(
    base: Any, input_ids: Tensor, attention_mask: Any, position_ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, LiveTeacher]:
    """One pass of the base over input_ids (B, T): its tapped layers (B, T, F), and the teacher."""
    from_hidden = gives_logits(base)
    part = decoder_of(base) if from_hidden else base
    with captures_of(base).installed() if layers else nullcontext(), last_output_kept(base, layers):
        out, features = run_tapped(
            base, part, layers, input_ids,
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False,
        )  # fmt: skip
    if not from_hidden:
        return features, WholeLogits(out.logits.flatten(0, 1))
    hidden = out.last_hidden_state.flatten(0, 1).to(input_ids.device)
    return features, LastHidden(hidden, lambda hidden: logits_of(base, hidden))
