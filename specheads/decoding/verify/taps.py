"""The states of a base that heads read, taken without leaving anything in the base.

transformers returns hidden_states 0 (embeddings) to n (after the final norm) of n layers. It reads them by forward
hooks, which it installs in the first pass that asks for them and never removes; a model with such hooks cannot be
pickled. Here they are in the model during our passes alone (`Captures`). Someone else's pass that asks for hidden
states meanwhile keeps them there, as if it had installed them itself. The last layer's output before the final norm,
which some heads read, is tap n + 1 here, taken by a hook of our own.

Shapes: B batch rows, T positions, H hidden size, F = tapped layers × hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from specheads.decoding.verify.hf_base import (
    UnsupportedModel,
    decoder_of,
    layer_count,
    text_config,
)


def last_output(config: Any) -> int:
    """The tap of the last layer's output before the final norm, for a base with this text config."""
    return layer_count(config) + 1


def refuse_missing_taps(taps: Sequence[int], config: Any) -> None:
    """ValueError if a base with this text config has no such states."""
    layers = layer_count(config)
    for tap in taps:
        if not 0 <= tap <= last_output(config):
            raise ValueError(
                f"tapped layer {tap} does not exist: the base has {layers} layers, so hidden_states 0 to {layers}, and "
                f"{layers + 1} for the last layer's output before the final norm"
            )


def decoder_layers(base: Any) -> nn.ModuleList | None:
    """The base's decoder layers: the first ModuleList in its text decoder that has as many modules as layers."""
    count = layer_count(text_config(base))
    return next((m for m in decoder_of(base).modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


class _Waiting(threading.local):
    """The passes of this thread that wait for the last layer's output, innermost last."""

    def __init__(self) -> None:
        self.outputs: list[Tensor | None] = []


_waiting = _Waiting()
_traced: list[Tensor | None] = []  # the same while torch traces a pass, which it does in one thread at a time


def keep_output(layer: nn.Module, args: Any, output: Any) -> None:
    """The hook. A pass of another thread, which waits for nothing, runs it too."""
    outputs = _traced if torch.compiler.is_compiling() else _waiting.outputs
    if outputs:
        outputs[-1] = output[0] if isinstance(output, tuple) else output


@contextmanager
def last_output_kept(base: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[None]:
    """In the block, `run_tapped` can read the last layer's output, if it is among these taps."""
    if last_output(text_config(base)) not in layers:
        yield
        return
    stack = decoder_layers(base)
    if stack is None:
        raise UnsupportedModel(
            f"{type(base).__name__}: its last layer was not found, so its output before the final norm (tap "
            f"{last_output(text_config(base))}) cannot be read"
        )
    handle = stack[-1].register_forward_hook(keep_output)
    try:
        yield
    finally:
        handle.remove()


def run_tapped(
    base: PreTrainedModel, part: Any, layers: tuple[int, ...], ids: Tensor, **arguments: Any
) -> tuple[Any, Tensor]:
    """A pass of `part`, the base or its decoder, in `last_output_kept` → its output and the taps (B, T, F). ids (B, T):
    the tokens of the pass. UnsupportedModel for a tap that the base does not give."""
    last = last_output(text_config(base))
    if last not in layers:
        out = part(output_hidden_states=hidden_state_indices(layers), **arguments)
        return out, concat_taps(out.hidden_states, layers, ids)
    states = tuple(k for k in layers if k != last)
    outputs = _traced if torch.compiler.is_compiling() else _waiting.outputs
    outputs.append(None)
    try:
        out = part(output_hidden_states=hidden_state_indices(states), **arguments)
    finally:
        kept = outputs.pop()
    features = concat_taps(out.hidden_states, states, ids)
    if kept is None or kept.dim() != 3 or kept.shape[:2] != ids.shape:
        raise UnsupportedModel(f"{type(base).__name__}: tap {last}, its last layer's output, is not a state a token")
    found = dict(zip(states, features.chunk(max(1, len(states)), -1), strict=False)) | {last: kept.to(ids.device)}
    return out, torch.cat([found[k] for k in layers], -1)


FLAG = "_output_capturing_hooks_installed"  # transformers' attribute of a model whose modules have the hooks
installing = output_capturing._hook_installation_lock  # acquired before `lock` where both are needed
lock = RLock()


class Captures:
    """The hooks of one base, and the passes that need them.

    The hooks are installed when transformers looks for them in a pass of ours (`Flag`), and put back, the same ones
    under the same ids, in each later pass.
    """

    def __init__(self) -> None:
        self._parts: list[ref[nn.Module]] = []
        self._flags: list[Flag] = []
        self._hooks: list[tuple[ref[nn.Module], int, Callable[..., Any]]] = []
        self._passes: dict[object, int] = {}  # each pass and its thread

    def renew(self, base: nn.Module) -> None:
        """Forget the hooks if the base's modules have changed."""
        parts = list(base.modules())
        with lock:
            if [part() for part in self._parts] != parts and not self._passes:
                self._parts, self._hooks = [ref(part) for part in parts], []
                self._flags = [Flag(self, part) for part in parts if isinstance(part, PreTrainedModel)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the block, a pass of this thread finds the hooks."""
        entry = object()
        try:
            with installing, lock:
                if not self._passes:
                    self._place()
                self._passes[entry] = get_ident()
            yield
        finally:
            try:
                self._leave(entry)
            except BaseException:  # an interrupt
                self._leave(entry)
                raise

    def _place(self) -> None:
        for flag in self._flags:
            if isinstance(other := flag.present, Flag):  # of a model that holds this one, or that this one holds
                other.captures.keep()
        if any(flag.present for flag in self._flags):  # hooks that stay: ours beside them would capture twice
            self._forget()
        for part, key, hook in self._hooks:
            if (module := part()) is not None:
                module._forward_hooks[key] = hook
        for flag in self._flags:
            if flag.present is None:
                flag.set(flag)
        # A forward that the caller has compiled does not ask for its hooks: they must be there when it is traced.
        if any(hasattr(vars(part()).get("forward"), "_torchdynamo_orig_callable") for part in self._parts):
            for flag in self._flags:
                if flag.present is flag and not flag.has_hooks:
                    self._install(flag)

    def _leave(self, entry: object) -> None:
        with installing, lock:
            self._passes.pop(entry, None)
            if self._passes:
                return
            for part, key, _ in self._hooks:
                if (module := part()) is not None:
                    module._forward_hooks.pop(key, None)
            for flag in self._flags:
                if flag.present is flag:
                    flag.set(None)

    def keep(self) -> None:
        """Leave the hooks that are in the model where they are: someone else relies on them."""
        for flag in self._flags:
            if flag.present is flag:
                flag.set(True if flag.has_hooks else None)
        self._forget()

    def _forget(self) -> None:
        self._hooks = []
        for flag in self._flags:
            flag.has_hooks = False

    def found(self, flag: Flag) -> bool:
        """Has the flag's model its hooks? Asked by transformers, in a pass that needs them."""
        with lock:
            if flag.present is not flag:
                return flag.present is True
            if not flag.has_hooks:
                self._install(flag)
            if get_ident() not in self._passes.values():
                self.keep()
            return True

    def _install(self, flag: Flag) -> None:
        model = flag.model()
        assert model is not None
        ours = [one for one in self._flags if one.present is one]
        before = [(part, set(part._forward_hooks)) for part in model.modules()]
        try:
            output_capturing.install_all_output_capturing_hooks(model)
        finally:
            for part, known in before:
                self._hooks += [(ref(part), key, hook) for key, hook in part._forward_hooks.items() if key not in known]
            for one in ours:
                if one.present is True:  # transformers' mark, on each model that it has gone through
                    one.has_hooks = True
                    one.set(one)


class Flag:
    """The value of `FLAG` in one model during our passes: true, once the model has its hooks."""

    has_hooks = False

    def __init__(self, captures: Captures, model: PreTrainedModel) -> None:
        self.captures, self.model = captures, ref(model)

    @property
    def present(self) -> Any:
        """The model's flag now: a `Flag`, True if hooks are in it for good, None if it has none."""
        model = self.model()
        value = None if model is None else vars(model).get(FLAG)
        return None if value is False else value

    def set(self, value: Flag | bool | None) -> None:
        if (model := self.model()) is None:
            return
        if value is None:
            del vars(model)[FLAG]
        else:
            vars(model)[FLAG] = value

    def __bool__(self) -> bool:
        return torch.compiler.is_compiling() or self.captures.found(self)

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (True,)  # in a copy of the model, which has copies of the hooks


_CAPTURES: WeakKeyDictionary[nn.Module, Captures] = WeakKeyDictionary()


def captures_of(base: nn.Module) -> Captures:
    """The captures of this base as its modules are now."""
    with lock:
        captures = _CAPTURES.setdefault(base, Captures())
        captures.renew(base)
        return captures


def hidden_state_indices(layers: tuple[int, ...]) -> list[int] | bool:
    """The output_hidden_states argument with which a base returns hidden_states[k] for every tapped layer k."""
    if not layers:
        return False  # with an empty list transformers would install its hooks
    # Since transformers 5.23 a list names the entries to keep. Before that its indices counted from the first layer's
    # output, not from the embeddings: the wrong layers, without an error.
    return sorted(set(layers)) if hasattr(output_capturing, "resolve_hidden_states_indices") else True


def concat_taps(hidden_states: tuple[Tensor | None, ...] | None, layers: tuple[int, ...], like: Tensor) -> Tensor:
    """The tapped hidden_states concatenated, (B, T, F); F = 0 without layers. like (B, T): the ids."""
    if not layers:
        return torch.empty(*like.shape, 0, device=like.device)
    assert hidden_states is not None
    if max(layers) >= len(hidden_states):
        raise UnsupportedModel(
            f"layer {max(layers)} cannot be tapped: the base gives hidden_states 0 to {len(hidden_states) - 1}"
        )
    return torch.cat([hidden_states[k].to(like.device) for k in layers], dim=-1)  # type: ignore[union-attr]
