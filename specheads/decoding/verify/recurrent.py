"""Recurrent layers under draft trees: linear attention, Mamba, short convolutions.

The state of such a layer can neither hold a tree nor be rewound. So the state is kept at the end of the committed text:
a pass over drafts runs on a copy, and before the next pass the layer is fed its inputs at the accepted nodes again.
Only that layer runs again, not the model: attention, MLP and output matrix see each token once.

Padding is not a no-op for a decaying state, so rows that commit different numbers of tokens run in groups of equal
length. A branching tree runs as its paths from the root, side by side as rows.

Shapes: B batch rows, R chosen rows, T columns of a pass, M chosen columns, N tree nodes, P paths, k nodes of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from specheads.decoding.tree import DraftTree

SHORTEST_CHUNK = 16  # of Mamba-2's kernel
State = list[Tensor]  # each (B, …): all that one layer carries from token to token


class StateCell(LinearAttentionLayer):
    """One layer's entry in the cache, from which the layer's code reads its state and to which it writes the next."""

    def load(self, state: State | None) -> None:
        """Set a copy of this state, or none."""
        self.has_previous_state = dict.fromkeys(self.has_previous_state, state is not None)
        if state is None:
            self.is_conv_states_initialized = dict.fromkeys(self.conv_states, False)
            self.is_recurrent_states_initialized = dict.fromkeys(self.recurrent_states, False)
            return
        for (states, index), value in zip(self._entries(), state, strict=True):
            states[index] = value.clone()  # the layer's code may write into it

    def take(self) -> State:
        """The state as the layer has left it."""
        return [states[index] for states, index in self._entries()]

    def _entries(self) -> list[tuple[dict, int]]:
        return [
            *((self.conv_states, index) for index, used in self.is_conv_states_initialized.items() if used),
            *((self.recurrent_states, index) for index, used in self.is_recurrent_states_initialized.items() if used),
        ]


@dataclass
class Inputs:
    """What a layer was called with. Tensors of shape (B or 1, T, …) hold a value per token, the rest is constant."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    columns: int

    def select(self, rows: Tensor, columns: Tensor) -> Inputs:
        """The inputs of rows (R,) at columns (R, M)."""
        rows = rows.unsqueeze(1)
        return self._map(lambda tensor: tensor[rows.to(tensor.device), columns.to(tensor.device)])

    def append(self, other: Inputs) -> Inputs:
        """The columns of both, those of `other` last."""
        more: list[Tensor] = []
        other._map(lambda tensor: more.append(tensor) or tensor)  # type: ignore[func-returns-value]
        following = iter(more)
        return self._map(lambda tensor: torch.cat([tensor, next(following)], 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        shape = [self.batch, self.columns]
        args = tuple(self._changed(value, change, shape) for value in self.args)
        kwargs = {name: self._changed(value, change, shape) for name, value in self.kwargs.items()}
        return Inputs(args, kwargs, *shape)

    def _changed(self, value: Any, change: Callable[[Tensor], Tensor], shape: list[int]) -> Any:
        """The value with `change` applied to its per-token tensors; `shape` is set to their new (rows, columns)."""
        if isinstance(value, tuple | list):
            return type(value)([self._changed(one, change, shape) for one in value])
        if not (isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == self.columns):
            return value
        if value.shape[0] not in (1, self.batch):
            return value
        value = change(value.expand(self.batch, *value.shape[1:]))
        shape[:] = value.shape[:2]
        return value


@dataclass(frozen=True)
class RecurrentModule:
    """The module that carries the state of layer `index`.

    one_by_one: given several tokens after a state, its code computes something else than one at a time (it drops the
    state, say), so it gets them one at a time. lock: a thread holds that of the base's first module while its
    pass replaces forward() of the base's modules.
    """

    index: int
    module: nn.Module
    one_by_one: bool = False
    lock: AbstractContextManager[Any] = field(default_factory=RLock, compare=False)


@dataclass
class RecurrentLayer:
    """A layer, and its state for B rows.

    cell: its entry in the cache. forward: the module's own. one_by_one: as in `RecurrentModule`. states: those of all
    layers, this one included, set only during a pass: a lasting reference cycle would keep all states alive until the
    garbage collector runs. committed: the state after the committed text. inputs: what the layer was fed since. after:
    the state after all of that, if each node was the child of the one before. level: the state after each node of the
    newest level drafted, (B · k, …).
    """

    module: nn.Module
    cell: StateCell
    forward: Callable[..., Tensor]
    one_by_one: bool = False
    states: RecurrentStates | None = None
    committed: State | None = None
    inputs: Inputs | None = None
    after: State | None = None
    level: State | None = None

    def route(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the module's forward in a pass of `states`."""
        states = self.states
        assert states is not None
        # The inputs kept from a pass must not refer to the cache, which refers to this layer.
        args = tuple(states.cells if isinstance(value, Cache) else value for value in args)
        kwargs = {name: states.cells if isinstance(value, Cache) else value for name, value in kwargs.items()}
        return states.forward(self, Inputs(args, kwargs, *states.shape))

    def run(self, inputs: Inputs, state: State | None) -> tuple[Tensor, State]:
        """The layer's output (R, M, …) starting from this state, and its final state."""
        self.cell.load(state)
        with short_chunks(self.module, inputs.columns):
            if state is None or inputs.columns == 1 or not self.one_by_one:
                return self.forward(*inputs.args, **inputs.kwargs), self.cell.take()
            rows = torch.arange(inputs.batch)
            each = [inputs.select(rows, torch.full((inputs.batch, 1), column)) for column in range(inputs.columns)]
            return torch.cat([self.forward(*one.args, **one.kwargs) for one in each], 1), self.cell.take()

    def advance(self, inputs: Inputs, columns: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """Commit the first lengths[b] of columns (B, M) of each row → the output (B, M, …) there, zeros elsewhere; None
        if no row commits any."""
        result: Tensor | None = None
        start = self.committed
        for length in sorted(set(lengths) - {0}):
            rows = torch.tensor([row for row, other in enumerate(lengths) if other == length], device=columns.device)
            before = None if start is None else take_rows(start, rows)
            out, state = self.run(inputs.select(rows, columns[rows, :length]), before)
            if self.committed is None:
                self.committed = [each.new_zeros(len(lengths), *each.shape[1:]) for each in state]
            self.committed = put_rows(self.committed, rows, state)
            if result is None:
                result = out.new_zeros(len(lengths), columns.shape[1], *out.shape[2:])
            result[rows.to(out.device), :length] = out
        return result


class RecurrentStates:
    """The recurrent layers of a base for one batch, and how the next pass runs them."""

    def __init__(self, layers: Sequence[RecurrentLayer], lock: AbstractContextManager[Any], cells: Cache) -> None:
        """lock: as in `RecurrentModule`. cells: a cache of all layers' entries, passed to the layers' code."""
        self.layers, self.lock, self.cells = layers, lock, cells
        self.shape: Sequence[int] = (0, 0)  # (B, T) of the pass's tokens
        self.lengths: list[int] | None = None  # how many tokens of each row the pass commits; None if it commits none
        self.paths: tuple[Tensor, Tensor, Tensor] | None = None  # `TreeTopology.paths`, if the pass's tree branches
        self.parents: Tensor | None = None  # (B, k) parents in the level above, if the pass is one level
        self.path: tuple[Tensor, Tensor] | None = None  # accepted nodes of the last pass that are not yet in the states

    @contextmanager
    def patched_forward(self) -> Iterator[None]:
        """In the block, a forward over (B, T) = `shape` tokens runs these layers as the current pass needs. Threads
        that share a base take turns."""
        with self.lock:
            replaced = [vars(layer.module).get("forward") for layer in self.layers]  # a hook's, where there is one
            for layer in self.layers:
                layer.states, layer.module.forward = self, layer.route
            try:
                yield
            finally:
                for layer, forward in zip(self.layers, replaced, strict=True):
                    layer.states = None
                    if forward is None:
                        del layer.module.forward
                    else:
                        layer.module.forward = forward

    def forward(self, layer: RecurrentLayer, inputs: Inputs) -> Tensor:
        """A layer's output in the current pass."""
        if self.lengths is not None:
            return self._read(layer, inputs, self.lengths)
        return self._verify(layer, inputs) if self.parents is None else self._draft(layer, inputs, self.parents)

    def begin_text(self, lengths: Sequence[int]) -> None:
        """The next pass reads prompts of these lengths, packed left."""
        self.lengths, self.paths, self.parents, self.path = list(lengths), None, None, None

    def begin_tree(self, tree: DraftTree) -> None:
        """The next pass verifies a tree after the committed text."""
        self.settle()
        self.lengths, self.paths, self.parents = None, None if tree.is_chain else tree.topology.paths, None

    def begin_levels(self) -> None:
        """The next passes draft a tree after the committed text, level by level."""
        self.settle()
        for layer in self.layers:
            layer.inputs = layer.after = layer.level = None

    def begin_level(self, parents: Tensor) -> None:
        """The next pass drafts nodes with these parents (B, k) in the level before."""
        self.lengths, self.paths, self.parents = None, None, parents

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Accept the first length (B,) nodes of path (B, P), indices into what was fed after the committed text."""
        self.path = path, length

    def settle(self) -> None:
        """Bring the states to the end of the committed text. The host waits for the accepted lengths."""
        if self.path is None:
            return
        (path, length), self.path = self.path, None
        with self.lock:
            self._feed_again(path, length.tolist())

    def _feed_again(self, path: Tensor, lengths: list[int]) -> None:
        """Feed the layers their inputs at the first lengths[b] nodes of path (B, P) again, now as committed text."""
        for layer in self.layers:
            assert layer.inputs is not None and layer.committed is not None
            rest = lengths
            if layer.after is not None and (whole := [n == layer.inputs.columns for n in lengths]).count(True):
                rows = torch.tensor([row for row, every in enumerate(whole) if every], device=path.device)
                every = len(rows) == len(lengths)
                layer.committed = (
                    layer.after if every else put_rows(layer.committed, rows, take_rows(layer.after, rows))
                )
                rest = [0 if every else n for n, every in zip(lengths, whole, strict=True)]
            layer.advance(layer.inputs, path, rest)
            layer.inputs = layer.after = None

    def replace_rows(self, rows: Tensor, other: RecurrentStates) -> None:
        """Give these rows (R,) the text of `other`, states of R rows."""
        self.settle()
        other.settle()
        for layer, source in zip(self.layers, other.layers, strict=True):
            assert layer.committed is not None and source.committed is not None
            layer.committed = put_rows(layer.committed, rows, source.committed)

    def _read(self, layer: RecurrentLayer, inputs: Inputs, lengths: list[int]) -> Tensor:
        """A pass that commits: the output (B, T, …), zeros in padding."""
        columns = torch.arange(inputs.columns).expand(inputs.batch, -1)
        out = layer.advance(inputs, columns, lengths)
        assert out is not None
        return out

    def _verify(self, layer: RecurrentLayer, inputs: Inputs) -> Tensor:
        """A pass over a tree: the output (B, N, …)."""
        assert layer.committed is not None
        layer.inputs, layer.after = inputs, None
        if self.paths is None:
            out, layer.after = layer.run(inputs, layer.committed)
            return out
        paths, path, level = self.paths
        batch, count, levels = paths.shape
        rows = torch.arange(batch, device=paths.device)
        copies = rows.repeat_interleave(count)
        out, _ = layer.run(inputs.select(copies, paths.flatten(0, 1)), take_rows(layer.committed, copies))
        out = out.view(batch, count, levels, *out.shape[2:])
        return out[rows.unsqueeze(1).to(out.device), path.to(out.device), level.to(out.device)]

    def _draft(self, layer: RecurrentLayer, inputs: Inputs, parents: Tensor) -> Tensor:
        """A pass over one level: the output (B, k, …)."""
        batch, count = parents.shape
        first = layer.level is None
        before = layer.committed if layer.level is None else layer.level
        assert before is not None
        rows = torch.arange(batch, device=parents.device)
        above = (rows.unsqueeze(1) * (len(before[0]) // batch) + parents).flatten()
        nodes = torch.arange(count, device=parents.device).repeat(batch).unsqueeze(1)
        out, layer.level = layer.run(inputs.select(rows.repeat_interleave(count), nodes), take_rows(before, above))
        in_line = count == 1 and (first or layer.after is not None)
        layer.inputs = inputs if layer.inputs is None else layer.inputs.append(inputs)
        layer.after = layer.level if in_line else None
        return out.view(batch, count, *out.shape[2:])


@contextmanager
def short_chunks(module: nn.Module, columns: int) -> Iterator[None]:
    """In the block a Mamba-2 layer computes in chunks no longer than the pass needs. Without its kernel it pads the
    last chunk: a pass over six tokens would cost as much as 256."""
    size = getattr(module, "chunk_size", None)
    needed = max(SHORTEST_CHUNK, 1 << (columns - 1).bit_length())
    if not isinstance(size, int) or size <= needed:
        yield
        return
    module.chunk_size = needed  # type: ignore[assignment]
    try:
        yield
    finally:
        module.chunk_size = size  # type: ignore[assignment]


def take_rows(state: State, rows: Tensor) -> State:
    return [each.index_select(0, rows.to(each.device)) for each in state]


def put_rows(state: State, rows: Tensor, values: State) -> State:
    return [each.index_copy(0, rows.to(each.device), new) for each, new in zip(state, values, strict=True)]
