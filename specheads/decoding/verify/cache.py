"""The key-value cache of tree verification: preallocated, per-row lengths, compaction in place.

Per layer one buffer (B, heads, S + capacity, d): first S scratch slots, of which a verify pass writes the tree into
the last N, then the committed slots; slot S + t holds position t. A pass attends the slice S − N … S + bucket under
one additive mask, so there are no ragged writes and no per-row loop. Layers of one shape share one stack: committing
a path is one gather and one scatter for all of them. Shapes: B batch rows, S scratch slots, N tree nodes, P = depth
of the tree + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specheads.decoding.verify.model_inputs import Layers
from specheads.decoding.verify.recurrent import RecurrentLayer, RecurrentModule, RecurrentStates
from specheads.decoding.verify.slot_writes import move_rows
from specheads.decoding.verify.tree_layer import TreeLayer, TreeStateLayer, Window

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
            with recurrent[0].turn:  # else `forward` might be the replacement of another thread's pass
                states = []
                for part in recurrent:
                    cell = self.tree_layers[part.index] = TreeStateLayer(self.window, number_of_states)
                    states.append(RecurrentLayer(part.module, cell, part.module.forward, part.one_by_one))
            self.recurrent = RecurrentStates(states, recurrent[0].turn, Cache(layers=list(self.tree_layers)))
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
            move_rows(stack.view(-1, stack.shape[-1]), source, destination)
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


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer looks: `full`, `sliding` (the last `size` positions) or `chunked` (blocks of `size`)."""

    kind: str = "full"
    size: int = 0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Broadcast positions → bool: may the query attend to the key, causality aside?"""
        if self.kind == "sliding":
            return query - key < self.size
        if self.kind == "chunked":
            return query // self.size == key // self.size
        return torch.ones((), dtype=torch.bool, device=query.device)


def visible(ancestors: Tensor, depth: Tensor, lengths: Tensor, attended: int, reach: Reach) -> Tensor:
    """Which of the attended cache slots each node of a pass sees: (B, N, attended) bool.

    ancestors (B, N, S) covers the first S of these slots, of which this pass writes the last N; depth (B, S): of those
    slots. Committed slots follow. lengths (B,): committed tokens.
    """
    batch, num, seen = ancestors.shape
    slot = torch.arange(attended - seen, device=lengths.device)
    committed = (slot < lengths.unsqueeze(1)).unsqueeze(1).expand(batch, num, -1)
    if reach.kind != "full":
        position = lengths.unsqueeze(1) + depth  # (B, S)
        query = position[:, -num:].unsqueeze(2)
        committed = committed & reach(query, slot)
        ancestors = ancestors & reach(query, position.unsqueeze(1))
    return torch.cat([ancestors, committed], dim=2)


class Levels:
    """A tree written into the scratch slots level by level: a node attends what its parent attends, and itself.

    position (B, 1): of the newest level's nodes. written: how many slots hold nodes, in the order they were fed.
    widths: nodes per level. The text must be committed up to and including the root.
    """

    def __init__(self, cache: TreeCache, dtype: torch.dtype) -> None:
        cache.open(cache.scratch)
        self.cache = cache
        lengths = cache.lengths.unsqueeze(1)
        # (B, 1, k, attended) the newest level's additive mask for layers of full attention
        self.seen = additive((cache.positions < lengths).unsqueeze(1), dtype)
        # Split once: cheaper than adding 1 at each level.
        self.levels = (lengths - 1 + torch.arange(cache.scratch + 1, device=lengths.device)).split(1, 1)
        self.columns = self.seen.narrow(-1, 0, cache.scratch).split(1, -1)
        self.slots = torch.arange(cache.scratch, device=lengths.device).view(1, 1, -1, 1)
        self.written = 0
        self.widths: list[int] = []

    @property
    def position(self) -> Tensor:
        return self.levels[len(self.widths)]

    def next_level(self, parents: Tensor) -> None:
        """Open the cache for the children of nodes parents (B, k) of the newest level (of the root, at first)."""
        start, stop = self.written, self.written + parents.shape[1]
        if stop > self.cache.scratch:
            raise ValueError(f"a tree of {stop} nodes below the root needs as many scratch slots: {self.cache.scratch}")
        self.cache.window.write_slots, self.written = self.slots[:, :, start:stop], stop
        self.widths.append(stop - start)
        if stop == len(self.widths):  # in a chain the mask's one row is reused
            self.columns[start].zero_()
        else:
            self.seen = gather_nodes(self.seen.squeeze(1), parents).unsqueeze(1).contiguous()
            self.seen[..., start:stop].diagonal(dim1=2, dim2=3).zero_()

    def mask(self, reach: Reach) -> Tensor:
        """(B, 1, k, attended) the newest level's additive mask for layers of this reach."""
        if reach.kind == "full":
            return self.seen
        near = reach(self.position, self._slot_positions()).view(len(self.seen), 1, 1, -1)
        return self.seen.masked_fill(~near, torch.finfo(self.seen.dtype).min)

    def _slot_positions(self) -> Tensor:
        """(B, attended) the position each slot holds; any number for slots not yet written."""
        first = self.position - (len(self.widths) - 1)
        levels = [(first + level).expand(-1, width) for level, width in enumerate(self.widths)]
        slot = torch.arange(self.cache.attended - self.written, device=first.device)
        return torch.cat([*levels, (slot - (self.cache.scratch - self.written)).expand(len(first), -1)], 1)


def gather_nodes(level: Tensor, index: Tensor) -> Tensor:
    """level (B, k, n), index (B, j) of its nodes → (B, j, n). A level of one node needs no gather."""
    if level.shape[1] == 1:
        return level if index.shape[1] == 1 else level.expand(-1, index.shape[1], -1)
    return level.gather(1, index.unsqueeze(-1).expand(-1, -1, level.shape[-1]))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, K) bool → additive mask (B, 1, N, K), 0 where True. Eager attention is silently wrong with a bool mask."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min).unsqueeze(1)
