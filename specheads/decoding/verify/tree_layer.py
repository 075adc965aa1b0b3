"""One layer's entry in the cache of tree verification, and what it shares with that cache.

Shapes: B batch rows, P positions that a pass writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from specheads.decoding.verify.recurrent import StateCell
from specheads.decoding.verify.slot_writes import write_slots


@dataclass
class Window:
    """Which slots a pass writes and attends: shared by a cache and its layers, which do not refer to the cache. A
    reference cycle would keep their buffers alive until the garbage collector runs.

    loaded: does the cache hold a prompt? first, end: a pass attends slots [first, end); scratch slots before `first`
    hold nothing that it may see. write_slots (B or 1, 1, P, 1): the slots it writes; None: from `first` on.
    """

    loaded: bool = False
    first: int = 0
    end: int = 0
    write_slots: Tensor | None = None

    @property
    def size(self) -> int:
        """How many slots a pass attends, those for a tree included."""
        return self.end - self.first


class TreeLayer(CacheLayerMixin):
    """One layer's view of the buffers; it holds the prompt until `TreeCache.load_prompt` has stacked it."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        window = self.window
        if not window.loaded:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        seen = slice(window.first, window.end)
        assert self.keys is not None and self.values is not None
        if (slots := window.write_slots) is not None:
            slots = slots.to(key_states.device)
            write_slots(self.keys, slots, key_states)
            write_slots(self.values, slots, value_states)
        else:
            start, stop = window.first, window.first + key_states.shape[2]
            self.keys[:, :, start:stop] = key_states
            self.values[:, :, start:stop] = value_states
        return self.keys[:, :, seen], self.values[:, :, seen]

    # Masks and positions are passed in, so the model must not derive either from the cache.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.size if self.window.loaded else query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeStateLayer(StateCell, TreeLayer):  # type: ignore[override]
    """A layer with a recurrent state, and in some models keys too."""

    def __init__(self, window: Window, number_of_states: int) -> None:
        TreeLayer.__init__(self, window)
        StateCell.__init__(self, number_of_states)
