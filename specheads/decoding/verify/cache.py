"""The key-value cache of tree verification: preallocated, per-row lengths, compaction in place.

Per layer one buffer (B, heads, S + capacity, d): first S scratch slots, of which a verify pass writes the tree into
the last N, then the committed slots; slot S + t holds position t. A pass attends the slice S − N … S + bucket under
one additive mask, so there are no ragged writes and no per-row loop. Layers of one shape share one stack: committing
a path is one gather and one scatter for all of them.

Slots that only the device knows are written by custom operations: torch's compiler keeps one that is declared to mutate
its argument in place, even if that is a view of a larger tensor. An indexed assignment to such a view becomes two
copies of the whole buffer, so that a compiled step would take longer the longer the text may become.

Shapes: B batch rows, S scratch slots, N tree nodes, P = depth of the tree + 1, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.decoding.verify.model_inputs import Layers
from specheads.decoding.verify.recurrent import RecurrentLayer, RecurrentModule, RecurrentStates, StateCell


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
            torch.ops.specheads.write_slots(self.keys, slots, key_states)
            torch.ops.specheads.write_slots(self.values, slots, value_states)
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


_library = torch.library.Library("specheads", "FRAGMENT")


def _move_rows(matrix: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy rows source (n,) of matrix (M, d) to rows destination (n,); all are read before any is written."""
    matrix.index_copy_(0, destination, matrix.index_select(0, source))


def _write_slots(buffer: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new (B, heads, P, d) to slots (B or 1, 1, P, 1) of buffer (B, heads, all slots, d)."""
    buffer.scatter_(2, slots.expand_as(new), new)


for _name, _arguments, _function in (
    ("move_rows", "Tensor(a!) matrix, Tensor source, Tensor destination", _move_rows),
    ("write_slots", "Tensor(a!) buffer, Tensor slots, Tensor new", _write_slots),
):
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specheads::{_name}", lambda *inputs: None)


BUCKET = 64  # attended lengths are rounded up to a multiple of this, so that shapes repeat
RESERVE = 1024  # slots allocated ahead of need: a high token limit costs memory only as text fills it


class TreeCache(Cache):
    """KV of every layer for B rows. `scratch` tree slots, then up to `capacity` committed slots, `size` allocated.

    lengths (B,) int64 on the device: committed tokens per row. bound: a host integer that no row's length exceeded when
    `prepare` was last called. `prepare` is for the host; what a pass does is on the device alone.
    recurrent: the states of layers that keep one, None without such layers.
    """

    def __init__(
        self, num_layers: int, scratch: int, capacity: int, *, static: bool = False,
        recurrent: Sequence[RecurrentModule] = (), number_of_states: int = 1,
    ) -> None:  # fmt: skip
        """static: allocate and attend only a few sizes, so that a compiled step sees few shapes. recurrent: the modules
        that keep states, number_of_states each."""
        self.static = static
        self.window = Window()
        self.tree_layers = [TreeLayer(self.window) for _ in range(num_layers)]
        self.recurrent: RecurrentStates | None = None
        if recurrent:
            with recurrent[0].lock:  # else `forward` might be the replacement of another thread's pass
                states = []
                for part in recurrent:
                    cell = self.tree_layers[part.index] = TreeStateLayer(self.window, number_of_states)
                    states.append(RecurrentLayer(part.module, cell, part.module.forward, part.one_by_one))
            self.recurrent = RecurrentStates(states, recurrent[0].lock, Cache(layers=list(self.tree_layers)))
        super().__init__(layers=list(self.tree_layers))
        self.scratch, self.capacity, self.size = scratch, capacity, 0
        self._positions: Tensor  # (end,)
        self.stacks: list[Tensor] = []  # (layers, B, heads, scratch + size, d), one for all layers of one shape
        self.first_slots: list[Tensor] = []  # (layers, B, heads, 1) per stack: the index of slot 0, in slots
        self.views: list[list[tuple[TreeLayer, str]]] = []  # per stack: the layer of each entry, and "keys" or "values"
        self.lengths: Tensor
        self.bound = 0

    def load_prefix(self, layers: Layers, lengths: Tensor, bound: int) -> None:
        """Commit the first lengths (B,) of these keys and values, one entry for each layer that keeps any. ValueError
        for another number of layers."""
        if len(layers) > len(self.tree_layers):
            raise ValueError(
                f"the cache has {len(layers)} layers, and the model {len(self.tree_layers)}; it is another model's"
            )
        for layer, pair in zip(self.tree_layers, layers, strict=False):
            if pair is not None:
                (layer.keys, layer.values), layer.is_initialized = [part[:, :, :bound] for part in pair], True
        self.load_prompt(lengths, bound)

    def load_prompt(self, lengths: Tensor, bound: int) -> None:
        """Commit the prompts that the layers hold, packed left in `bound` columns, and stack the buffers."""
        if bound > self.capacity:
            raise ValueError(f"a prompt of {bound} tokens does not fit a cache made for {self.capacity}")
        groups: dict[tuple, list[tuple[TreeLayer, str]]] = {}
        for layer in self.tree_layers:
            for name in ("keys", "values") if layer.is_initialized else ():
                held = getattr(layer, name)
                groups.setdefault((held.shape[:2], held.shape[3], held.dtype, held.device), []).append((layer, name))
        self.size = static_size(bound + self.scratch) if self.static else min(self.capacity, bound + RESERVE)
        for ((rows, heads), width, dtype, device), members in groups.items():
            # Zeros, not empty: a masked slot's value still enters 0 · v, and garbage may be NaN.
            shape = (len(members), rows, heads, self.scratch + self.size, width)
            stack = torch.zeros(shape, dtype=dtype, device=device)
            for i, (layer, name) in enumerate(members):
                stack[i, :, :, self.scratch : self.scratch + bound] = getattr(layer, name)
            self.stacks.append(stack)
            self.first_slots.append(first_slots(stack))
            self.views.append(members)
            self._share(stack, members)
        self.window.loaded, self.lengths = True, lengths
        self.prepare(bound)

    def join_rows(self, parts: Sequence[tuple[Tensor, TreeCache]], rows: int, columns: int) -> None:
        """Hold prompts of `columns` tokens that caches of some rows each hold: (their rows, cache), before any of them
        is loaded."""
        for n, layer in enumerate(self.tree_layers):
            for name in ("keys", "values") if parts[0][1].tree_layers[n].is_initialized else ():
                for index, cache in parts:
                    part = getattr(cache.tree_layers[n], name)
                    if not layer.is_initialized or getattr(layer, name) is None:
                        setattr(layer, name, part.new_zeros(rows, part.shape[1], columns, part.shape[3]))
                        layer.is_initialized = True
                    getattr(layer, name)[index.to(part.device), :, : part.shape[2]] = part

    def replace_rows(self, rows: Tensor, other: TreeCache, lengths: Tensor) -> None:
        """Give these rows (R,) the text of `other`, a cache of R rows: its first lengths (R,) committed tokens."""
        self.capacity = max(self.capacity, other.capacity)
        self.prepare(max(self.bound, other.bound))
        for stack, source in zip(self.stacks, other.stacks, strict=True):
            text = source[:, :, :, other.scratch : other.scratch + other.bound]
            stack[:, rows.to(stack.device), :, self.scratch : self.scratch + other.bound] = text
        self.lengths = self.lengths.index_copy(0, rows, lengths)
        if self.recurrent is not None and other.recurrent is not None:
            self.recurrent.replace_rows(rows, other.recurrent)

    def prepare(self, bound: int) -> None:
        """Attend `bound` committed slots, and allocate `scratch` more, the most that one pass commits.

        bound: no row has more committed tokens, those of an `append` included. ValueError if they exceed the capacity.
        """
        if bound > self.capacity:
            raise ValueError(f"{bound} tokens do not fit a cache made for {self.capacity}; ask for more at prefill")
        self.bound = bound
        if self.recurrent is not None:
            self.recurrent.settle()
        if self.static:
            attended = needed = static_size(bound + self.scratch)
        else:
            attended = min(self.capacity, -(-bound // BUCKET) * BUCKET)
            needed = min(self.capacity, max(attended, bound + self.scratch))
        if self.end != self.scratch + attended:
            self.window.end = self.scratch + attended
            self._positions = torch.arange(-self.scratch, attended, device=self.lengths.device)
            self._positions[: self.scratch] = torch.iinfo(torch.long).max
        if needed > self.size:
            self._grow(needed if self.static else min(self.capacity, max(needed, 2 * self.size)))

    @property
    def end(self) -> int:
        """See `Window`."""
        return self.window.end

    @property
    def attended(self) -> int:
        """How many slots a pass attends, those for a tree included."""
        return self.window.size

    @property
    def positions(self) -> Tensor:
        """(attended,) the position in each slot that a pass attends; for tree slots, a position no text reaches."""
        return self._positions[self.window.first :]

    def open(self, nodes: int) -> None:
        """Begin a tree of at most `nodes` nodes, written in order into the last `nodes` scratch slots."""
        self.window.first, self.window.write_slots = self.scratch - nodes, None

    def append(self, columns: int, length: Tensor) -> Tensor:
        """Begin a pass that writes the next `columns` tokens of each row straight into committed slots; returns their
        positions (B, columns). Only the first length (B,) of a row are committed; the next pass overwrites the others.
        """
        position = self.lengths.unsqueeze(1) + torch.arange(columns, device=self.lengths.device)
        self.window.first = self.scratch
        self.window.write_slots = (position + self.scratch).clamp(max=self.scratch + self.size - 1)[:, None, :, None]
        self.lengths = self.lengths + length
        return position

    def _grow(self, size: int) -> None:
        for n, (stack, members) in enumerate(zip(self.stacks, self.views, strict=True)):
            larger = stack.new_zeros(*stack.shape[:3], self.scratch + size, stack.shape[4])
            larger[:, :, :, : stack.shape[3]] = stack
            self.stacks[n], self.first_slots[n] = larger, first_slots(larger)
            self._share(larger, members)
        self.size = size

    def _share(self, stack: Tensor, members: Sequence[tuple[TreeLayer, str]]) -> None:
        """Give each layer its view of the stack, which passes read and write."""
        parts = [stack[i] for i in range(len(members))]
        for (layer, name), part in zip(members, parts, strict=True):
            setattr(layer, name, part)
        for tensor in (stack, *parts) if self.static else ():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Move the nodes path (B, P) of the tree to the next committed slots; length (B,): how many of a row are valid.

        All P are moved; those past `length` are masked, and the next commit overwrites them.
        """
        target = self.scratch + self.lengths.unsqueeze(1) + torch.arange(path.shape[1], device=path.device)
        target = target.clamp(max=self.scratch + self.size - 1)
        both = torch.stack([self.window.first + path, target]).unsqueeze(2)  # (2, B, 1, P)
        for stack, first in zip(self.stacks, self.first_slots, strict=True):
            # As rows of one matrix: on a CPU indexing two dimensions of the stack takes more than twice the time.
            source, destination = (first.unsqueeze(0) + both.to(first.device).unsqueeze(1)).flatten(1)
            torch.ops.specheads.move_rows(stack.view(-1, stack.shape[-1]), source, destination)
        self.lengths = self.lengths + length
        if self.recurrent is not None:
            self.recurrent.commit(path, length)


def static_size(needed: int) -> int:
    """`needed` rounded up to 256, 384, 512, 768, 1024, 1536 … slots: from 256 on at most half as many again."""
    size = max(256, 1 << (needed - 1).bit_length())
    return size * 3 // 4 if size > 256 and needed <= size * 3 // 4 else size


def first_slots(stack: Tensor) -> Tensor:
    """(layers, B, heads, slots, d) → (layers, B, heads, 1): how many slots precede those of each head."""
    *shape, slots, _ = stack.shape
    return (torch.arange(math.prod(shape), device=stack.device) * slots).view(*shape, 1)
