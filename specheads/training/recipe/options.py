"""The training section of a recipe, compared with the fields of SpecTrainingArguments before anything loads."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any

from specheads.heads import HEADS
from specheads.options import reason, refuse_unknown, shown

_PLAIN = (bool, int, float, str, list, tuple, dict, NoneType)  # YAML's types; other objects are left to the Trainer
# Types that a field accepts although its annotation does not say so.
_ALSO: dict[str, tuple[type, ...]] = {"resume_from_checkpoint": (bool,), "fsdp": (bool, list)}
# The package of each reporter whose presence transformers can check; the others say themselves what is missing.
_PACKAGES = {
    "comet_ml": "comet-ml", **{name: name for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow",
    "neptune", "swanlab", "tensorboard", "trackio", "wandb")},
}  # fmt: skip
# Evaluation metrics of any head; base: of adapters trained with it.
_METRICS = (
    "loss", "accepted_length", "accepted_length_error", "accepted_length_sampled", "accepted_length_tree", "base",
)  # fmt: skip
_BY_DEPTH = ("accuracy", "conditional_accuracy", "acceptance", "loss")
_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping",
    NoneType: "null",
}  # fmt: skip


def check(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the Trainer wants them: YAML's plain `no` as "no" where a field takes that word, 1e3 as 1000 where
    it takes whole numbers. ValueError, with the dotted name, for an unknown option or a value of a wrong type."""
    # Imported here: it takes seconds, which a typo in an override should not cost.
    from specheads.training.recipe.arguments import SpecTrainingArguments, refuse_out_of_bounds

    fields = {field.name: field for field in dataclasses.fields(SpecTrainingArguments) if field.init}
    refuse_unknown(options, fields, section="training.")
    hints = typing.get_type_hints(SpecTrainingArguments)
    checked = {name: _check_value(name, value, hints[name], fields[name].default) for name, value in options.items()}
    refuse_out_of_bounds(checked, section="training.")
    if (metric := checked.get("metric_for_best_model")) is not None:
        _refuse_unknown_metric(metric.removeprefix("eval_"))
    return checked


def _refuse_unknown_metric(name: str) -> None:
    kind, by_depth, depth = name.rpartition("_depth_")
    if not (by_depth and kind in _BY_DEPTH and depth.isdecimal() and int(depth) > 0):
        depths = [f"{kind}_depth_{depth}" for kind in _BY_DEPTH for depth in range(1, 9)]
        terms = [term for head in HEADS.values() for term in head.Config.loss_terms]
        refuse_unknown([name], [*_METRICS, *terms, *depths], "training.metric_for_best_model")


def _check_value(name: str, value: Any, hint: Any, default: Any) -> Any:
    kinds = _kinds(hint)
    words = [str(member.value) for kind in kinds if issubclass(kind, enum.Enum) for member in kind]
    if value is False and bool not in kinds and ("no" in words or name == "report_to"):
        return "none" if name == "report_to" else "no"
    if type(value) not in _PLAIN or (value is None and default is None):
        return value
    if words:
        if not isinstance(value, str):
            raise ValueError(f"training.{name}={shown(value)}: expected one of {', '.join(words)}")
        refuse_unknown([value], words, f"training.{name}")
        return value
    allowed = (*kinds, *_ALSO.get(name, ()))
    if type(value) is float and float not in allowed and int in allowed and value.is_integer():
        return int(value)
    if (
        type(value) in allowed
        or (type(value) is int and float in allowed)
        or (type(value) is tuple and list in allowed)
    ):
        if type(value) in (list, tuple) and (odd := [item for item in value if not isinstance(item, str)]):
            raise ValueError(f"training.{name}={shown(value)}: expected a list of names, and {shown(odd[0])} is none")
        return value
    expected = " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds if kind in _WORDS))
    raise ValueError(f"training.{name}={shown(value)}: expected {expected}")


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes in a field's annotation; dict for dict[str, Any]."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(type(value) for value in typing.get_args(hint))
    if isinstance(origin := typing.get_origin(hint), type) and origin in (list, dict):
        return (origin,)
    if arguments := typing.get_args(hint):
        return tuple(kind for argument in arguments for kind in _kinds(argument))
    return (hint,) if isinstance(hint, type) else ()


def refuse_absent_reporters(report_to: str | list[str] | None) -> None:
    """ValueError for a name in training.report_to that is unknown, or whose package is not installed. A Trainer would
    raise a RuntimeError only once everything is loaded."""
    from transformers.integrations import integration_utils as integrations

    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name not in ("none", "all")]
    refuse_unknown(names, [*integrations.INTEGRATION_TO_CALLBACK, "none", "all"], "training.report_to")
    installed = integrations.get_available_reporting_integrations()
    for name in set(names) - set(installed):
        lack = f"{_PACKAGES.get(name)} is not installed; pip install {_PACKAGES.get(name)}"
        if name not in _PACKAGES:
            try:
                integrations.INTEGRATION_TO_CALLBACK[name]()
                continue
            except (RuntimeError, ImportError) as error:
                lack = reason(error)
        raise ValueError(f"training.report_to={name}: {lack}, or give training.report_to=none")
