"""Drafts that are no head of a format read here, each recognised by its config, and what to do with one instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from specheads.models.files import CheckpointError
from specheads.models.formats.keys.config_table import architectures


class OtherKind(NamedTuple):
    """what: its name, after "it is". instead: what to do. known_by: tells it by its config. model: a whole model, which
    `DraftModel` drafts with."""

    what: str
    instead: str
    known_by: Callable[[dict[str, Any]], bool]
    model: bool = False


_TRAIN = "give the base a head of a kind known here with specheads.convert(), and train that"


def _class(pattern: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: any(re.match(pattern, name) for name in architectures(config))


def _value(key: str, *values: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config.get(key) in values


def _inside(table: str, key: str, value: str) -> Callable[[dict[str, Any]], bool]:
    def known(config: dict[str, Any]) -> bool:
        inner = config.get(table)
        return isinstance(inner, dict) and inner.get(key) == value

    return known


def _any(*ways: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda config: any(way(config) for way in ways)


def _eagle3_of(*types: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config.get("model_type") in types and _class(".*Eagle3")(config)


OTHER_KINDS = (
    OtherKind(
        "a PARD draft model, which drafts several tokens in one pass",
        "it is a whole model: give it to DraftModel (`--draft model:PATH` on a command line), which drafts "
        "with it one token at a time",
        lambda config: config.get("pard_token") is not None or config.get("spd_type") == "pard",
        model=True,
    ),
    OtherKind(
        "a Gemma-4 assistant, which reads its target's keys and values",
        f"transformers decodes with it, generate(assistant_model=…); here, {_TRAIN}",
        _value("model_type", "gemma4_assistant", "gemma4_unified_assistant"),
    ),
    OtherKind(
        "a Muse Glimmer assistant",
        f'transformers decodes with it, generate(speculation_type="dflash"); here, {_TRAIN}',
        _value("model_type", "muse_glimmer_assistant"),
    ),
    OtherKind(
        "an Arctic speculator (MLP or LSTM)", f"Arctic Inference serves it with vLLM; here, {_TRAIN}",
        _class(r"Arctic\w*Speculator|MLPVariantSpeculator"),
    ),
    OtherKind(
        "an MLPSpeculator", f"vLLM's older versions serve it; here, {_TRAIN}",
        _any(_value("model_type", "mlp_speculator"), _class("MLPSpeculator")),
    ),
    OtherKind(
        "a ReDrafter (recurrent drafter)", f"TensorRT-LLM serves it; here, {_TRAIN}",
        _any(_value("model_type", "recurrent_drafting_drafter"), _class("ReDrafter|RecurrentDraft")),
    ),
    OtherKind(
        "an EAGLE head in vLLM's wrapper (model_type eagle)",
        "import the EAGLE checkpoint that the wrapper was made from",
        _value("model_type", "eagle"),
    ),
    OtherKind("a DSpine head", _TRAIN, _any(_class("DSpine"), lambda config: "dspine_config" in config)),
    OtherKind(
        "an EAGLE-3 head whose config has the model_type of its target, not of its own block",
        'where the block is Llama\'s, as in SpecForge\'s heads, write "model_type": "llama" and every size into '
        "config.json",
        _eagle3_of("phi3", "llama4_text", "llama4", "qwen2", "mistral"),
    ),
)  # fmt: skip


def other_kind(config: dict[str, Any]) -> OtherKind | None:
    """The kind of draft that a config describes, if it is one that no format here reads."""
    return next((kind for kind in OTHER_KINDS if kind.known_by(config)), None)


def refuse_unread_kind(where: object, config: dict[str, Any]) -> None:
    """CheckpointError, with what to do instead, if a config describes a kind of draft that no format here reads."""
    if (kind := other_kind(config)) is not None:
        raise CheckpointError(f"{where}: it is {kind.what}, which is not read here: {kind.instead}")
