"""What a compiled graph depends on, as parts of its key: torch's settings, the form of tensors, and in a module its
parts, their classes and code, and all that they hold.

Weights are read anew at each step, so of a tensor only the form counts. Nothing is told apart by an address that may be
used again: functions are compared by code and closure, other objects through weak references.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.decoding.kernels.few_rows import is_active, is_own_forward
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.grouped_attention import NAME as GROUPED
from specheads.decoding.verify.taps import keep_output

_TABLES = {name for name, value in vars(nn.Module()).items() if name != "training"}  # each module has them, most empty
# Attributes that no forward pass reads.
_UNREAD = {
    name for name in _TABLES if name.startswith(("_backward", "_is_full_backward", "_state_dict", "_load_state"))
}
_UNREAD |= {"_non_persistent_buffers_set", "generation_config", "name_or_path", "_name_or_path", "warnings_issued"}
_PLAIN = (bool, int, float, str)
_VALUES = (int, complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPEN = (PreTrainedConfig, types.SimpleNamespace)  # objects compared by what they hold, as dataclasses are

_numbers: WeakKeyDictionary[Any, dict[Hashable, int]] = WeakKeyDictionary()
_next = itertools.count()


def module_state(owner: Any) -> tuple[ref, int]:
    """A module, or a drafter that is none, and a number for its state: equal for states that no graph can tell apart.

    Some 2 ms for 160 modules, and 4 for 420: once a call, not once a step.
    """
    walk = _Walk()
    state = walk.of_parts(owner), walk.of(dict(ALL_ATTENTION_FUNCTIONS)), *walk.codes.values()
    return ref(owner), _numbers.setdefault(owner, {}).setdefault(state, next(_next))


def constants_of(owner: Any) -> tuple:
    """The class of a logits processor or rule and the values of its attributes; only the form of tensors, whose values
    a graph reads at each call."""
    return type(owner), _Walk().of(dict(sorted(vars(owner).items())))


def code_of(*owners: Any) -> tuple:
    """What the classes of these objects, and the modules in which they are defined, name."""
    walk = _Walk()
    return tuple(walk.code(type(owner)) for owner in owners)


class _Walk:
    """Describes values by what a graph may hold of them. What was met before is described by its number, so that what
    is shared is part of the state and loops end."""

    def __init__(self) -> None:
        self.met: dict[int, tuple[int, Any]] = {}  # by id: the values are kept meanwhile, and so are their ids
        self.codes: dict[type, Hashable] = {}

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return "sdpa" if value == GROUPED else value  # another thread may be in a pass
        if kind in _VALUES:
            return kind, value
        if kind is float:
            return kind, repr(value)  # NaN equals no other, and -0.0 equals 0.0
        if (met := self.met.get(id(value))) is not None:
            return "met", met[0]
        self.met[id(value)] = len(self.met), value
        if isinstance(value, nn.Module):
            return self.of_parts(value)
        if isinstance(value, Tensor):
            steps = value.stride() if value.layout == torch.strided else None
            return kind, value.shape, steps, value.dtype, value.device
        if isinstance(value, dict | Mapping):
            return ref(kind), *((self.of(key), self.of(one)) for key, one in value.items())
        if isinstance(value, list | tuple):
            return ref(kind), *map(self.of, value)
        if isinstance(value, Set):
            return ref(kind), frozenset(map(self.of, value))
        if kind is types.FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
            default = self.of(value.__defaults__), self.of(value.__kwdefaults__)
            return value.__module__, value.__code__, default, *map(self.of, cells)
        if kind is types.MethodType:
            return "method", self.of(value.__func__), self.of(value.__self__)
        if kind is functools.partial:
            return "partial", self.of(value.func), self.of(value.args), self.of(value.keywords)
        is_open = isinstance(value, _OPEN) or (is_dataclass(value) and not isinstance(value, type))
        return self.of_parts(value) if is_open and hasattr(value, "__dict__") else _Same(value)

    def of_parts(self, owner: Any) -> Hashable:
        """The owner's class and its attributes."""
        kind = type(owner)
        self.met.setdefault(id(owner), (len(self.met), owner))
        if kind not in self.codes:
            self.codes[kind] = self.code(kind)
        held = dict(vars(owner))
        if keep_output in held.get("_forward_hooks", {}).values():  # there during a pass alone
            hooks = held["_forward_hooks"]
            held["_forward_hooks"] = type(hooks)((n, one) for n, one in hooks.items() if one is not keep_output)
        if is_own_forward(held.get("forward")):  # likewise
            held.pop("forward", None)
        own = [
            (name, self.of(value))
            for name, value in held.items() if name not in _UNREAD and (name not in _TABLES or value)
        ]  # fmt: skip
        return ref(kind), *own

    def code(self, kind: type) -> Hashable:
        """What the class and its bases define, and what their modules name, down to torch's own."""
        own = itertools.takewhile(lambda one: not one.__module__.startswith(("torch.", "builtins")), kind.__mro__)
        return tuple((self.names(one), self.names(sys.modules.get(one.__module__))) for one in own)

    def names(self, owner: Any) -> Hashable:
        """The functions and plain values of a class, or of a module of Python."""
        if (met := self.met.get(id(owner))) is not None:
            return "met", met[0]
        self.met[id(owner)] = len(self.met), owner
        found = vars(owner).items() if owner is not None else ()
        return tuple(
            (name, _Same(value) if callable(value) else value)
            for name, value in found if callable(value) or (type(value) in _PLAIN and not name.startswith("__"))
        )  # fmt: skip


class _Same:
    """Equal to another of the same object, as long as that exists."""

    __slots__ = ("hash", "object")

    def __init__(self, value: Any) -> None:
        self.hash = id(value)
        try:
            self.object: Any = ref(value)
        except TypeError:  # kept, so that no other object takes its address
            self.object = lambda: value

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Same) and (value := self.object()) is not None and value is other.object()


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def torch_settings() -> tuple:
    """The settings of torch and of our kernels that compiled code depends on, or that guards would check."""
    products, hooks = torch.backends.cuda.matmul, vars(torch.nn.modules.module)
    return (
        is_active(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        products.fp32_precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        # Which kernels of attention may be chosen.
        *(
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        ),
        # Hooks of all modules; their numbers are not used again.
        *(tuple(hooks[name]) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")),
    )


def options_as_tensors(owner: Any, device: torch.device, names: Sequence[str]) -> Any:
    """A copy of a logits processor or rule with these options as tensors, whose values a graph reads at each call."""
    result = copy.copy(owner)
    for name in names:
        if isinstance(value := getattr(owner, name, None), float):
            dtype = torch.float32 if device.type == "mps" else torch.float64  # that of a Python float; MPS has none
            vars(result)[name] = torch.tensor(value, dtype=dtype, device=device)
    return result


def draft_shapes(tree: DraftTree) -> tuple:
    """What a graph depends on in the draft probabilities that a tree carries."""
    probs, logits = tree.probs, tree.logits
    return (
        None if probs is None else (probs.shape, probs.dtype),
        None if logits is None else (logits.logits.shape, logits.logits.dtype, logits.ids is None, logits.vocab_size),
    )
