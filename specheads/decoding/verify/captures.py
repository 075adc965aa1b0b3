"""Hidden states of a base, read without leaving anything in the base.

transformers reads them by forward hooks, which it installs in the first pass that asks for them and never removes; a
model with such hooks cannot be pickled. Here they are in the model during our passes alone. Someone else's pass that
asks for hidden states meanwhile keeps them there, as if it had installed them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

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
            same = len(parts) == len(self._parts) and all(
                old() is new for old, new in zip(self._parts, parts, strict=True)
            )
            if not same and not self._passes:
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
