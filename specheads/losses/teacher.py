"""The teacher of a head: the base's law of the next token at any position of a batch, made only where it is asked for.

Shapes: B batch rows, T positions, F features, H hidden, V vocabulary, R positions asked for, K likeliest tokens kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.draft_ids import DraftIds
from specheads.decoding.precision import at_least_float32
from specheads.decoding.sampler import likeliest
from specheads.decoding.target.cache import additive
from specheads.decoding.target.hf_base import (
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
from specheads.losses.teacher_probs import NEVER, DenseTeacherProbs, TeacherProbs, TopKTeacherProbs


class Teacher(Protocol):
    """Positions (R,) are indices into the batch laid flat."""

    def probs(self, positions: Tensor, draft: DraftIds | None) -> TeacherProbs:
        """Renormalised over the draft vocabulary, and without gradients."""
        ...


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

    def probs(self, positions: Tensor, draft: DraftIds | None) -> DenseTeacherProbs:
        return DenseTeacherProbs(self.logits_at(positions), draft)


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
        full = at_least_float32(logits)
        total = full.logsumexp(-1)
        kept, ids = full.topk(min(k, full.shape[-1]), dim=-1)
        # Of equally likely tokens topk puts any first; the best is the one that argmax names.
        best = likeliest(logits).unsqueeze(-1)
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

    def probs(self, positions: Tensor, draft: DraftIds | None) -> TopKTeacherProbs:
        return TopKTeacherProbs.of(self.ids[positions].long(), self.log_p[positions], self.tail[positions], draft)


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
