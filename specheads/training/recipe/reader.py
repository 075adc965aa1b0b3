"""Reads options into dataclasses: every name and every type is checked against their fields before anything loads."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from types import NoneType
from typing import Any

from specheads.data.config import DataConfig
from specheads.heads import HEADS
from specheads.models.base.lora import JointConfig
from specheads.options import nearest, refuse_unknown, shown
from specheads.training.distributed.launch import LaunchConfig
from specheads.training.parity import ParityConfig

SECTIONS: dict[str, type | None] = {
    "training": None, "head": None, "data": DataConfig, "launch": LaunchConfig, "parity": ParityConfig,
    "lora": JointConfig,
}  # fmt: skip
# Names that other trainers give to options.
_ELSEWHERE = {
    "lr": "training.learning_rate", "epochs": "training.num_train_epochs", "num_epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "data": "data.train", "dataset": "data.train", "train_data": "data.train", "eval_data": "data.eval",
    "max_seq_length": "data.max_length", "model": "base", "model_name_or_path": "base", "base_model": "base",
    "head": "head.kind", "resume": "training.resume_from_checkpoint", "output": "training.output_dir",
}  # fmt: skip
_PLAIN = (bool, int, float, str, list, tuple, dict, NoneType)  # YAML's types; other objects are left to the Trainer
# Types that a field accepts although its annotation does not say so.
_ALSO: dict[str, tuple[type, ...]] = {
    "resume_from_checkpoint": (bool,), "fsdp": (bool, list), "distributed": (bool,),
}  # fmt: skip
_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping",
    NoneType: "null",
}  # fmt: skip


def read_options(kind: Any, options: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """The options of a dataclass: YAML's plain `no` as "no" where a field takes that word, 1e3 as 1000 where it takes
    whole numbers. ValueError, with the dotted name, for an unknown option or a value of a wrong type."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    refuse_unknown(options, fields, section=section)
    hints = typing.get_type_hints(kind)
    return {
        name: _check_value(section + name, value, hints[name], fields[name].default) for name, value in options.items()
    }


def read_section(name: str, value: Any, top: Iterable[str]) -> dict[str, Any]:
    """The options of a recipe's section, {} for null, with names that belong to another section refused. top: the keys
    without a section."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        key = key_of(name, top)
        hint = f"; did you mean {key}={value}?" if isinstance(value, str) and key != name else ""
        raise ValueError(f"{name}={value!r:.60}: expected a mapping of options{hint}")
    for option in value:
        if option not in names_in(name) and (key := key_of(str(option), top, similar=False)):
            raise ValueError(f"unknown option {shown(f'{name}.{option}')}; did you mean {key!r}?")
    return dict(value)


@cache
def names_in(section: str) -> frozenset[str]:
    """The options of a section; of `head`, those of every kind."""
    if section == "head":
        heads = [head.Config for head in HEADS.values()]
        return frozenset(name for config in heads for name in ("kind", *_names(config), *config.aliases))
    if section == "training":
        from specheads.training.recipe.arguments import SpecTrainingArguments  # it takes seconds

        return frozenset(_names(SpecTrainingArguments))
    return frozenset(_names(SECTIONS[section]))


def key_of(name: str, top: Iterable[str], *, similar: bool = True) -> str | None:
    """The key that an option means, whatever its section and dashes: `--learning-rate` and `head.learning_rate` mean
    training.learning_rate. top: the keys without a section. similar: if no key has that name, take the nearest one."""
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    keys = {key: f"{section}.{key}" for section in reversed(SECTIONS) for key in sorted(names_in(section))}
    keys |= {key: key for key in top} | _ELSEWHERE
    key = last if last in keys or not similar else nearest(last, keys)
    return None if key is None else keys.get(key)


def is_switch(key: str) -> bool:
    """Whether an option of a section is true or false, so that its flag needs no value."""
    section, _, name = key.rpartition(".")
    if section not in SECTIONS:
        return False
    if section == "training":
        from specheads.training.recipe.arguments import SpecTrainingArguments

        kinds: list[Any] = [SpecTrainingArguments]
    else:
        kinds = [head.Config for head in HEADS.values()] if section == "head" else [SECTIONS[section]]
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    return any(field.name == name and field.type in ("bool", bool) for field in fields)


def _names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.init]


def _check_value(name: str, value: Any, hint: Any, default: Any) -> Any:
    kinds, words = _kinds(hint), _choices(hint)
    if value is False and bool not in kinds and ("no" in words or name == "training.report_to"):
        return "none" if name == "training.report_to" else "no"
    if type(value) not in _PLAIN or object in kinds or (value is None and default is None):
        return value
    if words:
        if not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)}: expected one of {', '.join(words)}")
        refuse_unknown([value], words, name)
        return value
    allowed = (*kinds, *_ALSO.get(name.rpartition(".")[2], ()))
    if type(value) is float and float not in allowed and int in allowed and value.is_integer():
        return int(value)
    if (
        type(value) in allowed
        or (type(value) is int and float in allowed)
        or (type(value) is tuple and list in allowed)
    ):
        if type(value) in (list, tuple) and (odd := [item for item in value if not isinstance(item, str)]):
            raise ValueError(f"{name}={shown(value)}: expected a list of names, and {shown(odd[0])} is none")
        return value
    expected = " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds if kind in _WORDS))
    raise ValueError(f"{name}={shown(value)}: expected {expected}")


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes in a field's annotation; dict for dict[str, Any], object for Any."""
    if hint is Any:
        return (object,)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(type(value) for value in typing.get_args(hint))
    if isinstance(origin := typing.get_origin(hint), type) and issubclass(origin, list | Mapping):
        return (list if issubclass(origin, list) else dict,)
    if arguments := typing.get_args(hint):
        return tuple(kind for argument in arguments for kind in _kinds(argument))
    return (hint,) if isinstance(hint, type) else ()


def _choices(hint: Any) -> list[str]:
    """The words that a field takes: the members of an Enum or a Literal."""
    if typing.get_origin(hint) is typing.Literal:
        return [value for value in typing.get_args(hint) if isinstance(value, str)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(member.value) for member in hint]
    if typing.get_origin(hint) is list:  # of several such words
        return []
    return [word for argument in typing.get_args(hint) for word in _choices(argument)]
