"""A draft vocabulary: the head drafts only the target's most frequent tokens, so that its output matrices are small.

Tokens outside it are never drafted, which costs accepted tokens but not exactness. EAGLE-3, arXiv:2503.01840; FR-Spec,
arXiv:2502.14856. Shapes: V vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.kernels.int8_linear import applied_weight
from specheads.heads.base import DraftHead
from specheads.heads.config import HeadConfig


def check_draft_vocabulary(draft_size: int | None, size: int | None) -> None:
    """ValueError if a draft vocabulary is larger than the base's."""
    if size and draft_size and draft_size > size:
        raise ValueError(f"draft_vocab_size={draft_size} exceeds the base's vocabulary of {size}")


def check_mask_token(mask: int | None, size: int) -> None:
    """ValueError if the token that masked slots read is none of the base's."""
    if mask is not None and mask >= size:
        raise ValueError(f"mask_token_id={mask} is no token of a vocabulary of {size}")


def draft_offsets(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Target ids (Vd,) of a draft vocabulary → d2t (Vd,) and t2d (V,). ValueError if they are not distinct tokens, or
    are the whole vocabulary in another order."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise ValueError(f"names token {int(ids.max())} or {int(ids.min())} of {vocab}")
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    if int(t2d.sum()) != len(ids):
        raise ValueError(f"names {len(ids) - int(t2d.sum())} tokens twice")
    d2t = ids - torch.arange(len(ids))
    if len(ids) == vocab and d2t.any():
        raise ValueError("reorders the whole vocabulary, which heads here do not")
    return d2t, t2d


class DraftVocabulary(DraftHead):
    """A head with its own output matrices (Vd, H), over `config.output_size` tokens."""

    d2t: Tensor  # (Vd,) int64: target id = draft id + d2t[draft id]
    t2d: Tensor  # (V,) bool: whether the target token is in the draft vocabulary

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.vocab_size and config.output_size
        self.register_buffer("d2t", torch.zeros(config.output_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.output_size)

    @abstractmethod
    def output_layers(self) -> Iterable[nn.Linear]:
        """The linear layers whose outputs are draft tokens."""

    def output_parameters(self) -> list[Tensor]:
        return [parameter for layer in self.output_layers() for parameter in layer.parameters()]

    @property
    def narrow(self) -> bool:
        """Whether the draft vocabulary leaves tokens out."""
        return len(self.d2t) < len(self.t2d)

    @property
    def target_ids(self) -> Tensor | None:
        if not self.narrow:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, counts: Tensor, base: Any = None) -> None:
        """Draft the most frequent tokens: counts (V,) over the training data; the lower id on ties.

        With `base`, the output layers are reset to its rows for those tokens. ValueError for counts of a wrong shape.
        """
        if counts.shape != self.t2d.shape:
            raise ValueError(f"token counts have shape {tuple(counts.shape)}, expected ({len(self.t2d)},)")
        size = len(self.d2t)
        kept = counts.to(self.d2t.device).argsort(descending=True, stable=True)[:size].sort().values
        self.d2t.copy_(kept - torch.arange(size, device=kept.device))
        self.t2d.zero_()
        self.t2d[kept] = True
        if base is not None:
            self.copy_output_rows(base)

    def copy_output_rows(self, base: Any) -> None:
        """Copy the base's output rows for the draft tokens into every output layer of the same width."""
        source = applied_weight(base.get_output_embeddings())
        if source.is_meta:
            return
        ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        for layer in self.output_layers():
            if source.shape[-1] == layer.weight.shape[-1]:
                with torch.no_grad():
                    layer.weight.copy_(source[ids.to(source.device)])
