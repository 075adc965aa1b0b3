"""Reading a head checkpoint without its base, and refusing it with the reason if its parts do not fit together."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from specheads.heads import HEADS, DraftHead, HeadConfig
from specheads.heads.vocabulary import draft_offsets
from specheads.hub import did_you_mean, hub_options, may_be_repository
from specheads.models.base.loading import auto_class
from specheads.models.base.lora import JointConfig, is_adapter
from specheads.models.config import SpecConfig
from specheads.models.files import CONFIG, MOST_JSON, WEIGHTS, CheckpointError, read_header, read_tensors
from specheads.models.formats.importing import find_foreign
from specheads.models.formats.keys.other_kinds import refuse_unread_kind
from specheads.models.formats.keys.without_effect import WITHOUT_EFFECT
from specheads.options import listing, reason, shortened, shown

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TABLES, _NAMES = (
    ("head", "base_fingerprint", "joint", "base_quantization"),
    ("base_model_name_or_path", "base_revision"),
)
_VALUES = "trained_length", "base_class"
_MOST_NAME = 4096  # characters of a path
_MOST_LENGTH = 2**40  # tokens of a text
logger = hf_logging.get_logger(__name__)


def head_tensors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's part of a SpecModel's state dict, under the same names, contiguous and on the CPU."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if name.startswith("head.")}


def adapter_tensors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' part, `base.…lora_…`, likewise."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if is_adapter(name)}


def head_of(state_dict: dict[str, Tensor], config: HeadConfig) -> DraftHead:
    """A head with these options and the tensors of a SpecModel's state dict, to be described, not to draft."""
    with torch.device("meta"):
        head = HEADS[config.kind](config)
    tensors = {name.removeprefix("head."): t for name, t in head_tensors(state_dict).items()}
    head.load_state_dict(tensors, strict=True, assign=True)
    return head


def state_dict_mismatches(tensors: dict[str, Tensor], config: HeadConfig) -> str:
    """How `tensors` differ from those of a head with these options, in names, shapes or dtypes; "" if they do not."""
    with torch.device("meta"):  # only sizes: nothing is allocated for what a file claims
        own = {f"head.{name}": t for name, t in HEADS[config.kind](config).state_dict().items()}
    missing, unexpected = set(own) - set(tensors), set(tensors) - set(own)
    found = [f"{what} [{listing(names, 12, shown)}]" for what, names in
             (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
    for name, wanted in own.items():
        given = tensors.get(name, wanted)
        if given.shape != wanted.shape:
            found.append(f"{name} has shape {shortened(tuple(given.shape))}, not {tuple(wanted.shape)}")
        elif given.dtype != wanted.dtype and not (given.is_floating_point() and wanted.is_floating_point()):
            found.append(f"{name} is {given.dtype}, not {wanted.dtype}")
    return "; ".join(found[:16])


@dataclass(frozen=True)
class SavedHead:
    """A checkpoint: its config, the head's part of it, and the tensors, named `head.…`; folder: where it is."""

    config: SpecConfig
    head: HeadConfig
    tensors: dict[str, Tensor]
    folder: Path


def read(source: Any, **hub: Any) -> SavedHead:
    """Read a checkpoint without its base, from a directory or hub id. hub: revision, subfolder, token … for a hub id.

    The config in the weights file is used, except that the base's name comes from config.json if there is one, since a
    user may edit it there. CheckpointError says what is wrong and where. A foreign format is refused too: it can only
    be read together with its base.
    """
    try:
        return _read(source, hub)
    except CheckpointError as error:
        if (foreign := find_foreign(source, hub)) is None:
            raise
        options = ["--base", "BASE"] * (foreign.base_name is None) + ["--allow-pickle"] * foreign.files.pickled
        raise CheckpointError(
            f"{source} holds {foreign.form.title}, which can only be read beside its base; import it first: "
            f"`{shlex.join(['specheads', 'import', str(source), 'OUT', *options])}`"
        ) from error


def read_configs(source: Any, base_config: PreTrainedConfig) -> tuple[HeadConfig, JointConfig | None]:
    """The options of the head at `source` and of its adapters, without its weights: of a checkpoint in our format, or
    in a foreign one (such as a target's own MTP modules), for a base with this config."""
    if (foreign := find_foreign(source)) is None:
        saved = read(source)
        return saved.head, None if saved.config.joint is None else JointConfig.of(saved.config.joint)
    with torch.device("meta"):
        base = auto_class(base_config).from_config(base_config)
    return foreign.head_config(base), None


def _read(source: Any, hub: dict[str, Any]) -> SavedHead:
    beside = None
    if path := _find(source, CONFIG, hub):
        with open(path, "rb") as file:
            beside = _parsed(file.read(MOST_JSON + 1), path, source)
    weights = _find(source, WEIGHTS, hub)
    if weights is None:
        raise CheckpointError(f"{source} has no {WEIGHTS}: it is not a head checkpoint, or an unfinished one")
    shapes, metadata = read_header(weights)
    text = metadata.get("specheads_config")
    stored = beside if text is None else _agreed(_parsed(text, f"the header of {weights}", source), beside, source)
    if stored is None:
        raise CheckpointError(f"{source} has no {CONFIG}, and no config in the header of {WEIGHTS}")
    known = {name: stored.get(name) or None for name in (*_TABLES, *_NAMES, *_VALUES)}
    config = SpecConfig(**known, architectures=["SpecModel"])
    try:
        head = config.head_config()
        joint = None if config.joint is None else JointConfig.of(config.joint)
        adapters = {name: t for name, t in shapes.items() if joint and is_adapter(name)}
        differing = state_dict_mismatches({name: t for name, t in shapes.items() if name not in adapters}, head)
        differing = differing or ("" if joint is None else _rank_mismatches(adapters, joint))
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = reason(error) or _left_out(config)  # a head asserts that it has sizes
        raise CheckpointError(f"{source}: its config does not describe a head this version knows: {why}") from error
    if differing:
        raise CheckpointError(f"{source}: the tensors do not fit its head: {differing}")
    tensors = read_tensors(weights, shapes)
    _refuse_odd_vocabulary(weights, tensors)
    return SavedHead(config, head, tensors, Path(weights).parent)


def _left_out(config: SpecConfig) -> str:
    head = config.head_config()
    return f"sizes are missing or null, among {listing(f.name for f in fields(head) if getattr(head, f.name) is None)}"


def _rank_mismatches(adapters: dict[str, Tensor], joint: JointConfig) -> str:
    """The first adapter whose shape does not match the rank in the config, as a message; "" if there is none."""
    wrong = []
    for name, t in adapters.items():
        first = name.rpartition(".lora_")[2].partition(".")[0].endswith("A")  # (r, n), and B is (n, r)
        if not t.is_floating_point() or t.dim() != 2 or t.shape[0 if first else 1] != joint.r:
            wrong.append(f"{shortened(name)} has shape {shortened(tuple(t.shape))}, and lora.r={joint.r}")
    return wrong[0] if wrong else ""


def _refuse_odd_vocabulary(path: Any, tensors: dict[str, Tensor]) -> None:
    """CheckpointError if a head's d2t and t2d do not form a draft vocabulary: drafts could be outside the base's."""
    d2t, t2d = tensors.get("head.d2t"), tensors.get("head.t2d")
    if d2t is None or t2d is None:
        return
    try:
        _, drafted = draft_offsets(torch.arange(len(d2t)) + d2t, len(t2d))
    except ValueError as error:
        raise CheckpointError(f"{path}: head.d2t {error}; copy or train it again") from error
    if not torch.equal(drafted, t2d):
        raise CheckpointError(f"{path}: head.t2d and head.d2t do not name the same {len(d2t)} tokens")


def _agreed(inside: dict[str, Any], beside: dict[str, Any] | None, source: Any) -> dict[str, Any]:
    """The config `inside` the weights file, but with the base named by config.json `beside` it. Warns if the two
    disagree about the head."""
    if beside is None:
        return inside
    name, revision = _NAMES
    agreed = dict(inside)
    if name in beside and beside[name] != inside.get(name):
        logger.info("%s: its base is %s in %s, and %s in the header of %s; the former is used", source,
                    shown(beside[name]), CONFIG, shown(inside.get(name)), WEIGHTS)  # fmt: skip
        agreed[name] = beside[name]
        agreed[revision] = None  # it belonged to the other base
    if revision in beside and beside[revision] != inside.get(revision):
        agreed[revision] = beside[revision]
    differing = []
    for table in _TABLES:
        ours, theirs = inside.get(table) or {}, beside.get(table) or {}
        for option in sorted(ours.keys() | theirs.keys()) if table in beside else ():
            if not _same(ours.get(option), theirs.get(option)):
                differing.append(f"{table}.{shortened(option)} is {shown(ours.get(option))}, not "
                                 f"{shown(theirs.get(option))}")  # fmt: skip
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        logger.warning(
            "%s: the header of %s differs from %s, and the header counts: %s%s. To change options, change those of "
            "the head in memory and save it again", source, WEIGHTS, CONFIG, "; ".join(differing[:4]), more,
        )  # fmt: skip
    return agreed


def _same(one: object, other: object) -> bool:
    try:
        return one == other
    except RecursionError:  # nested deeper than any option
        return False


def _parsed(text: str | bytes, where: Any, source: Any) -> dict[str, Any]:
    if len(text) > MOST_JSON:
        raise CheckpointError(f"{where} has a config of more than {MOST_JSON:,} bytes; a head's has thousands")
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested deeper than any config
        raise CheckpointError(f"{where} is not JSON ({reason(error)}); copy or save the checkpoint again") from error
    kind = stored.get("model_type") if isinstance(stored, dict) else None
    if kind != SpecConfig.model_type:
        refuse_unread_kind(where, stored if isinstance(stored, dict) else {})
        raise CheckpointError(
            f"{where} is not the config of a draft head (model_type={shown(kind)}); for a base model train one, "
            f"`{shlex.join(['specheads', 'train', 'eagle3', f'base={source}'])}`, or begin one in Python with "
            "specheads.convert()"
        )
    known = {*_TABLES, *_NAMES, *_VALUES, "model_type", "architectures", *WITHOUT_EFFECT}
    if unknown := [name for name, value in stored.items() if value is not None and name not in known]:
        raise CheckpointError(
            f"{where} has {listing(unknown)}, which this version of specheads does not know; take a newer one, or take "
            "it away if it says nothing of the head"
        )
    for name in _TABLES:
        if not isinstance(stored.get(name) or {}, dict):
            raise CheckpointError(f"{where}: {name} must be a table of options, not {shown(stored[name])}")
    length = stored.get("trained_length")
    if length is not None and (type(length) is not int or not 1 <= length <= _MOST_LENGTH):
        raise CheckpointError(f"{where}: trained_length must be a whole number of tokens, not {shown(length)}")
    for name in _NAMES:
        value = stored.get(name)
        if value is not None and not (
            isinstance(value, str) and len(value) <= _MOST_NAME and min(value, default=" ") >= " "
        ):
            raise CheckpointError(f"{where}: {name} must be a name or a path, not {shown(value)}")
    return stored


def _find(source: Any, name: str, hub: dict[str, Any]) -> str | None:
    """The path of one file of a checkpoint; None if its directory has no such file."""
    folder = Path(source) / hub.get("subfolder", "")
    if folder.is_dir():
        if (folder / name).is_file():
            return str(folder / name)
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        if name == WEIGHTS and pickles:
            raise CheckpointError(
                f"{folder} has no {WEIGHTS}; its pickles {pickles} are not loaded, since a pickle can run code"
            )
        return None
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the folder of a checkpoint")
    if not may_be_repository(str(source)):
        raise CheckpointError(
            f"{folder} is not a directory with {CONFIG} and {WEIGHTS}, nor a hub id (owner/name)"
            f"{did_you_mean(str(source), 'model')}"
        )
    try:
        options = {**hub_options(source, **hub), **hub}
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from error
    try:
        return cached_file(str(source), name, **options)
    except OSError as error:
        raise CheckpointError(
            f"{source} is neither a directory nor a hub repository with {name}: {reason(error)}"
        ) from error
