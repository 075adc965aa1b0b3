"""Turns the object that a user holds into the model with the head; its former contents move to a new one, the base."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import nn
from torch.distributed.fsdp import FSDPModule

from specheads.compat.patch import unpatch
from specheads.decoding.verify.hf_base import unwrapped
from specheads.models.spec_model import SpecModel


def transform(held: Any, make: Callable[[Any], SpecModel]) -> SpecModel:
    """Make `held` what make(base) returns, where base is a new object with held's class, modules, hooks and attributes.

    Returns held; unchanged if make() raises. ValueError if held already has a head, is compiled, or is sharded.
    """
    _refuse(held)
    base = _twin(held)
    model = make(base)
    for hooks in _hook_tables(base):
        _move(hooks, hooks, held, base)
    vars(held).clear()
    held.__class__ = type(model)
    _move(vars(model), vars(held), model, held)
    return held


def _refuse(held: Any) -> None:
    if isinstance(held, SpecModel):
        raise ValueError(
            f"this model already has a head ({held.head.config.kind}); load the base again for another one, or keep "
            "both with specheads.convert(model.base, ...)"
        )
    base = unwrapped(held)  # TypeError unless it is a transformers model
    if isinstance(base, FSDPModule):
        raise ValueError(f"this {type(base).__name__} is sharded (fully_shard); convert it before")
    if held._compiled_call_impl is not None:
        raise ValueError(f"this {type(held).__name__} is compiled (model.compile()); convert it before")


def _twin(held: nn.Module) -> nn.Module:
    """A new object with the class and contents of `held`. Whatever was bound to held is bound to the new object."""
    twin = object.__new__(type(held))
    _move(vars(held), vars(twin), held, twin)
    if "generate" in vars(twin):
        unpatch(twin)  # undo specheads.patch(): the model with the head drafts without it
    return twin


def _hook_tables(module: nn.Module) -> list[MutableMapping[Any, Any]]:
    """The module's tables of forward, backward and state dict hooks. They must be changed in place, since the handles
    that remove hooks refer to them."""
    return [value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)]


def _move(source: MutableMapping[Any, Any], into: MutableMapping[Any, Any], old: object, new: object) -> None:
    for name, value in source.items():
        into[name] = _rebound(value, old, new)


def _rebound(value: Any, old: object, new: object) -> Any:
    """A method, partial or closure of `old`, such as accelerate's forward() and to(), rebound to `new`; any other value
    unchanged."""
    if value is old:
        return new
    if isinstance(value, MethodType) and value.__self__ is old:
        return MethodType(value.__func__, new)
    if isinstance(value, partial):
        keywords = {name: _rebound(each, old, new) for name, each in value.keywords.items()}
        rebound = partial(
            _rebound(value.func, old, new), *(_rebound(each, old, new) for each in value.args), **keywords
        )
        _move(vars(value), vars(rebound), old, new)  # including __wrapped__
        return rebound
    if isinstance(value, FunctionType) and value.__closure__:
        return _rebound_closure(value, old, new)
    if isinstance(owner := getattr(value, "module", None), ref) and owner() is old:  # torch's hooks with their module
        value.module = ref(new)
    return value


def _rebound_closure(function: FunctionType, old: object, new: object) -> FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # the closure's cell is still empty
            held = None
        moved = _rebound(held, old, new)
        cells.append(cell if moved is held else CellType(moved))
    rebound = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    _move(vars(function), vars(rebound), old, new)
    return rebound
