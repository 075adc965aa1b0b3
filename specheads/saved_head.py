"""What a head checkpoint holds, read without its base and refused, with the reason, where it does not hold together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from specheads.heads import HEADS, HeadConfig
from specheads.hub import may_be_repository
from specheads.hub import options as hub_options
from specheads.joint import JointConfig, is_adapter

if TYPE_CHECKING:
    from specheads.spec_model import SpecConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class CheckpointError(ValueError):
    """A head checkpoint that cannot be used; the message says what is wrong with which file."""


def head_tensors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's part of a SpecModel's state dict, under the names it has there, contiguous and on the CPU."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if name.startswith("head.")}


def adapter_tensors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of the adapters that were trained with it, `base.…lora_…`."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if is_adapter(name)}


def misfits(tensors: dict[str, Tensor], config: HeadConfig) -> str:
    """How `tensors` differ from what a head of these options holds, by name; "" where they do not."""
    claimed = max(getattr(config, name, None) or 0 for name in ("num_layers", "num_heads"))
    if claimed > max(64, len(tensors)):  # else a claim of a billion layers would be built before it is found to be none
        return f"{claimed} layers or heads cannot be made up of {len(tensors)} tensors"
    with torch.device("meta"):  # sizes only: nothing is allocated for what a file claims
        own = {f"head.{name}": t for name, t in HEADS[config.kind](config).state_dict().items()}
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    found = [f"missing {missing}"] * bool(missing) + [f"unexpected {unexpected}"] * bool(unexpected)
    for name, wanted in own.items():
        given = tensors.get(name, wanted)
        if given.shape != wanted.shape:
            found.append(f"{name} has shape {tuple(given.shape)}, not {tuple(wanted.shape)}")
        elif given.dtype != wanted.dtype and not (given.is_floating_point() and wanted.is_floating_point()):
            found.append(f"{name} is {given.dtype}, not {wanted.dtype}")
    return "; ".join(found)


@dataclass(frozen=True)
class SavedHead:
    """What a checkpoint holds: its config and the head's part of it, the tensors as `head.…`; folder: where it is."""

    config: SpecConfig
    head: HeadConfig
    tensors: dict[str, Tensor]
    folder: Path


def read(source: Any, **hub: Any) -> SavedHead:
    """A checkpoint without its base, from a directory or hub id; hub: revision, subfolder, token … of a hub id.

    The config in the weights file is the one that counts. Raises CheckpointError with what is wrong and where, as for
    a foreign form, which is read beside its base alone.
    """
    from specheads.formats.importing import detect

    try:
        return _read(source, hub)
    except CheckpointError as error:
        if (foreign := detect(source, hub)) is None:
            raise
        raise CheckpointError(
            f"{source} holds {foreign.form.title}, which takes its base to be read: write it in our form first, with "
            f"`specheads import {source} OUT`"
        ) from error


def _read(source: Any, hub: dict[str, Any]) -> SavedHead:
    from specheads.spec_model import SpecConfig

    stored = None
    if path := _find(source, CONFIG, hub):
        stored = _parsed(Path(path).read_bytes(), path)
    weights = _find(source, WEIGHTS, hub)
    if weights is None:
        raise CheckpointError(f"{source} has no {WEIGHTS}: not a head checkpoint, or one that was never finished")
    try:
        with safe_open(weights, framework="pt") as file:
            text = (file.metadata() or {}).get("specheads_config")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{weights} is damaged or cut short ({error}); copy or train it again") from error
    if text is not None:
        stored = _parsed(text, f"the header of {weights}")
    if stored is None:
        raise CheckpointError(f"{source} has no {CONFIG}, nor a config in the header of {WEIGHTS}")
    config = SpecConfig.from_dict(stored)
    try:
        head = config.head_config()
        joint = None if config.joint is None else JointConfig.of(config.joint)
        beside = adapter_tensors(tensors) if joint else {}
        differing = misfits({name: t for name, t in tensors.items() if name not in beside}, head)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: its config does not describe a head this version knows: {error}") from error
    if differing:
        raise CheckpointError(f"{source}: the tensors do not fit its head: {differing}")
    return SavedHead(config, head, tensors, Path(weights).parent)


def _parsed(text: str | bytes, where: Any) -> dict[str, Any]:
    from specheads.spec_model import SpecConfig

    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested deeper than any config
        raise CheckpointError(f"{where} is not JSON ({error}); copy or save the checkpoint again") from error
    kind = stored.get("model_type") if isinstance(stored, dict) else None
    if kind != SpecConfig.model_type:
        raise CheckpointError(
            f"{where} is not the config of a draft head (model_type={kind!r}); a base model is given a head with "
            "specheads.convert()"
        )
    wrong = [name for name in ("head", "base_fingerprint", "joint") if not isinstance(stored.get(name) or {}, dict)]
    if wrong:
        raise CheckpointError(f"{where}: {wrong[0]} should be a table of options, not {stored[wrong[0]]!r}")
    return stored


def _find(source: Any, name: str, hub: dict[str, Any]) -> str | None:
    """The path of one file of a checkpoint; None where a directory does not hold it."""
    folder = Path(source) / hub.get("subfolder", "")
    if folder.is_dir():
        if (folder / name).is_file():
            return str(folder / name)
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        if name == WEIGHTS and pickles:
            raise CheckpointError(
                f"{folder} has no {WEIGHTS}, and its pickles {pickles} are not loaded, since a pickle can run code"
            )
        return None
    if folder.is_file() or not may_be_repository(str(source)):
        raise CheckpointError(f"{folder} is not a directory with {CONFIG} and {WEIGHTS}, nor a hub id (owner/name)")
    try:
        return cached_file(str(source), name, **{**hub_options(str(source)), **hub})
    except OSError as error:
        raise CheckpointError(f"{source} is neither a directory nor a hub repository with {name}: {error}") from error
