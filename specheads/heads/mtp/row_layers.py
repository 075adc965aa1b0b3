"""The target's layers over a training row: their attention is `row_attention`, which needs no mask of (B, T, T).

Layers that choose their attention by name find it under NAME. Others attend eagerly, under a whole mask, and keep
their weights. Shapes: B batch rows, T positions, N queries, s earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from specheads.decoding.verify.hf_base import UnsupportedModel
from specheads.decoding.verify.masks import additive
from specheads.heads.layers.row_attention import RowMask, row_attention

NAME = "specheads_row"  # in transformers' registry of attention implementations
Keys = dict[int, tuple[Tensor, Tensor]]  # slot of a layer → its keys and values (B, heads, positions, d)


@dataclass(frozen=True, slots=True)
class StepMask:
    """What the queries of a step see. row: of step 0's keys. own (B, N, s) bool: of their own keys of each later
    step."""

    row: RowMask
    own: Tensor

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(B, 1, N, T + s · N) the additive mask over all keys of all steps."""
        number = self.own.shape[1]
        same = torch.eye(number, dtype=torch.bool, device=self.own.device)
        later = [same & own.unsqueeze(2) for own in self.own.unbind(2)]
        return additive(torch.cat([self.row.part(slice(0, number)), *later], 2), dtype)


class StepCache(Cache):
    """The keys and values that layers attend in a training step: earlier steps', then their own, with gradients."""

    def __init__(self, earlier: list[Keys]) -> None:
        super().__init__(layers=[])
        self.earlier = earlier
        self.added: Keys = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.added[layer_idx] = key_states, value_states
        both = [*(keys[layer_idx] for keys in self.earlier), self.added[layer_idx]]
        keys, values = zip(*both, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


_current: ContextVar[tuple[StepMask, list[int]]] = ContextVar("step mask, and layers that attended under it")


@contextmanager
def layers_over_row(
    config: PreTrainedConfig, mask: StepMask, cache: StepCache, dtype: torch.dtype
) -> Iterator[Tensor | None]:
    """In the block, layers with this config attend under the mask. Gives the mask to hand to them.

    UnsupportedModel if a layer that added keys to the cache has not asked for its attention by name.
    """
    name = config._attn_implementation
    if name == "eager":
        yield mask.dense(dtype)
        return
    attended: list[int] = []
    token = _current.set((mask, attended))
    config._attn_implementation_internal = NAME
    try:
        yield None
        if len(attended) < len(cache.added):
            raise UnsupportedModel(
                f"a layer of {config.model_type} computes attention of its own, which an MTP head cannot train; use "
                "another kind of head, 'eagle3' say"
            )
    finally:
        config._attn_implementation_internal = name
        _current.reset(token)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    more = [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]
    if more:
        raise UnsupportedModel(
            f"attention of {type(module).__name__} has {', '.join(more)}, which an MTP head cannot train; use another "
            "kind of head, 'eagle3' say"
        )
    (mask, attended), number = _current.get(), query.shape[2]
    attended.append(number)
    sizes = [key.shape[2] - mask.own.shape[2] * number, *[number] * mask.own.shape[2]]
    out = row_attention(
        query, key.split(sizes, 2), value.split(sizes, 2), mask.row, own_mask=mask.own, scale=scaling
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
