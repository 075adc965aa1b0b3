"""The key-value cache of an encoder-decoder's decoder: slot t holds position t, each row as long as it is.

Shapes: B batch rows, R rows of one pass, W columns of a pass, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.decoding.target.cache import RESERVE


class SlotCache(Cache):
    """Self-attention keys and values of B rows, slot t for position t; `lengths` (B,) of them are committed."""

    def __init__(self, batch: int, capacity: int, lengths: Tensor) -> None:
        self.batch, self.capacity, self.lengths = batch, capacity, lengths
        self.at: slice | Tensor = slice(0, batch)
        self.first, self.width = 0, 0
        self.own: Tensor | None = None
        self.slot_layers: list[SlotLayer] = []
        super().__init__(layers=self.slot_layers)  # type: ignore[arg-type]

    def open(self, at: slice | Tensor, first: int, width: int, own: Tensor | None) -> None:
        """Prepare a pass of the rows `at` over the slots first … first + width, of which own (R, W) are written."""
        self.at, self.first, self.width, self.own = at, first, width, own

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.slot_layers) <= layer_idx:
            self.slot_layers.append(SlotLayer(self))
        return self.slot_layers[layer_idx].update(key_states, value_states)

    # Asked before the first layer is made, too.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.first + query_length, 0


class SlotLayer(CacheLayerMixin):
    """One layer of a SlotCache."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._made(key_states, None), self._made(value_states, None)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.cache.first + self.cache.width > self.keys.shape[2]:
            self.keys, self.values = self._made(key_states, self.keys), self._made(value_states, self.values)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _made(self, states: Tensor, held: Tensor | None) -> Tensor:
        """A buffer (B, heads, slots, d) with room to spare, that begins with `held`."""
        end, capacity = self.cache.first + self.cache.width, self.cache.capacity
        size = min(capacity, end + RESERVE) if held is None else min(capacity, max(end, 2 * held.shape[2]))
        # Zeros, not empty: a masked slot's value still enters 0 · v, and garbage may be NaN.
        made = states.new_zeros(self.cache.batch, states.shape[1], size, states.shape[3])
        if held is not None:
            made[:, :, : held.shape[2]] = held
        return made

    def _written(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write states (R, heads, W, d); return the slots up to their end (R, heads, first + W, d)."""
        cache, window = self.cache, slice(self.cache.first, self.cache.first + self.cache.width)
        if cache.own is not None:
            own = cache.own.to(states.device).unsqueeze(1).unsqueeze(3)
            states = torch.where(own, states, buffer[cache.at][:, :, window])
        buffer[cache.at, :, window] = states
        return buffer[cache.at][:, :, : window.stop]

    def get_seq_length(self) -> int:
        return self.cache.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.first + query_length, 0

    def get_max_length(self) -> int:
        return -1
