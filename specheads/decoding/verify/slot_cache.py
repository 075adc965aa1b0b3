"""The key-value cache of an encoder-decoder's decoder: slot t holds position t, and each row has its own length.

Shapes: B batch rows, R rows of one pass, W columns of a pass, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.decoding.verify.cache import RESERVE


@dataclass
class SlotWindow:
    """What a pass writes: shared by a cache of `batch` rows and at most `capacity` slots and its layers, which do not
    refer to the cache, so that no reference cycle keeps their buffers alive.

    rows: the batch rows of the pass; first, width: it covers `width` slots from `first`; write_mask (R, W): which of
    them it writes, None for all.
    """

    batch: int
    capacity: int
    rows: slice | Tensor
    first: int = 0
    width: int = 0
    write_mask: Tensor | None = None


class SlotCache(Cache):
    """Self-attention keys and values of B rows, slot t for position t; `lengths` (B,) of them are committed."""

    def __init__(self, batch: int, capacity: int, lengths: Tensor) -> None:
        self.lengths, self.window = lengths, SlotWindow(batch, capacity, slice(0, batch))
        self.slot_layers: list[SlotLayer] = []
        super().__init__(layers=self.slot_layers)  # type: ignore[arg-type]

    def open(self, rows: slice | Tensor, first: int, width: int, write_mask: Tensor | None) -> None:
        """Prepare a pass, see `SlotWindow`."""
        window = self.window
        window.rows, window.first, window.width, window.write_mask = rows, first, width, write_mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.slot_layers) <= layer_idx:
            self.slot_layers.append(SlotLayer(self.window))
        return self.slot_layers[layer_idx].update(key_states, value_states)

    # Also called before the first layer exists.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window.first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.window.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.window.first + query_length, 0


class SlotLayer(CacheLayerMixin):
    """One layer of a SlotCache."""

    is_sliding = False

    def __init__(self, window: SlotWindow) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._grow(key_states, None), self._grow(value_states, None)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.window.first + self.window.width > self.keys.shape[2]:
            self.keys, self.values = self._grow(key_states, self.keys), self._grow(value_states, self.values)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _grow(self, states: Tensor, buffer: Tensor | None) -> Tensor:
        """A larger buffer (B, heads, slots, d) for states like these, with the content of `buffer`."""
        end, capacity = self.window.first + self.window.width, self.window.capacity
        size = min(capacity, end + RESERVE) if buffer is None else min(capacity, max(end, 2 * buffer.shape[2]))
        # Zeros, not empty: a masked slot's value still enters 0 · v, and garbage may be NaN.
        larger = states.new_zeros(self.window.batch, states.shape[1], size, states.shape[3])
        if buffer is not None:
            larger[:, :, : buffer.shape[2]] = buffer
        return larger

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write states (R, heads, W, d); returns the slots up to their end, (R, heads, first + W, d)."""
        window, slots = self.window, slice(self.window.first, self.window.first + self.window.width)
        if window.write_mask is not None:
            mask = window.write_mask.to(states.device).unsqueeze(1).unsqueeze(3)
            states = torch.where(mask, states, buffer[window.rows][:, :, slots])
        buffer[window.rows, :, slots] = states
        return buffer[window.rows][:, :, : slots.stop]

    def get_seq_length(self) -> int:
        return self.window.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.first + query_length, 0

    def get_max_length(self) -> int:
        return -1
