"""Reading a head checkpoint without its base, and refusing it with the reason if its parts do not fit together."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.utils import logging as hf_logging

from specheads.heads import HEADS, HeadConfig
from specheads.heads.vocabulary import draft_offsets
from specheads.hub import did_you_mean, hub_options, may_be_repository
from specheads.models.base.loading import auto_class
from specheads.models.base.lora import JointConfig, is_adapter
from specheads.models.config import SpecConfig
from specheads.models.files import CONFIG, WEIGHTS, CheckpointError, parse_table, read_header, read_tensors
from specheads.models.formats.files import Files
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
_KEYS = (*_TABLES, *_NAMES, *_VALUES)
_MAX_NAME = 4096  # characters of a path
_MAX_LENGTH = 2**40  # tokens of a text
logger = hf_logging.get_logger(__name__)


def select_head(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's part of a SpecModel's state dict, under the same names, contiguous and on the CPU."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if name.startswith("head.")}


def select_adapters(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' part, `base.…lora_…`, likewise."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if is_adapter(name)}


def state_dict_mismatches(tensors: dict[str, Tensor], config: HeadConfig) -> str:
    """How `tensors` differ from those of a head with these options, in names, shapes or dtypes; "" if they do not."""
    with torch.device("meta"):  # only sizes: nothing is allocated for what a file claims
        expected = {f"head.{name}": t for name, t in HEADS[config.kind](config).state_dict().items()}
    wrong = []
    for what, names in (("missing", set(expected) - set(tensors)), ("unexpected", set(tensors) - set(expected))):
        if names:
            wrong.append(f"{what} [{listing(names, 12, shown)}]")
    for name, wanted in expected.items():
        tensor = tensors.get(name, wanted)
        if tensor.shape != wanted.shape:
            wrong.append(f"{name} has shape {shortened(tuple(tensor.shape))}, not {tuple(wanted.shape)}")
        elif tensor.dtype != wanted.dtype and not (tensor.is_floating_point() and wanted.is_floating_point()):
            wrong.append(f"{name} is {tensor.dtype}, not {wanted.dtype}")
    return "; ".join(wrong[:16])


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
    files = Files(source, hub)
    try:
        return read_files(files)
    except CheckpointError as error:
        if (foreign := find_foreign(files)) is None:
            raise
        options = ["--base", "BASE"] * (foreign.base_name is None) + ["--allow-pickle"] * files.pickled
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


def read_files(files: Files) -> SavedHead:
    """The checkpoint in these files, in our format."""
    beside = None
    if (path := files.find(CONFIG)) is not None:
        beside = _checked(files.config or parse_table(path.read_bytes(), path), path, files)
    if (weights := files.find(WEIGHTS)) is None:
        raise _absent(files)
    shapes, metadata = read_header(weights)
    text, where = metadata.get("specheads_config"), f"the header of {weights}"
    stored = beside if text is None else _agreed(_checked(parse_table(text, where), where, files), beside, files)
    if stored is None:
        raise CheckpointError(f"{files} has no {CONFIG}, and no config in the header of {WEIGHTS}")
    config = SpecConfig(**{name: stored.get(name) or None for name in _KEYS}, architectures=["SpecModel"])
    try:
        head = config.head_config()
        joint = None if config.joint is None else JointConfig.of(config.joint)
        adapters = {} if joint is None else {name: t for name, t in shapes.items() if is_adapter(name)}
        differing = state_dict_mismatches({name: t for name, t in shapes.items() if name not in adapters}, head)
        differing = differing or ("" if joint is None else _rank_mismatches(adapters, joint))
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = reason(error) or _left_out(config)  # a head asserts that it has sizes
        raise CheckpointError(f"{files}: its config does not describe a head this version knows: {why}") from error
    if differing:
        raise CheckpointError(f"{files}: the tensors do not fit its head: {differing}")
    tensors = read_tensors(weights, shapes)
    _refuse_odd_vocabulary(weights, tensors)
    return SavedHead(config, head, tensors, weights.parent)


def _left_out(config: SpecConfig) -> str:
    head = config.head_config()
    sizes = head.base_defaults(LlamaConfig())  # those that every saved head has
    return f"sizes are missing or null, among {listing(name for name in sizes if getattr(head, name) is None)}"


def _rank_mismatches(adapters: dict[str, Tensor], joint: JointConfig) -> str:
    """The first adapter whose shape does not match the rank in the config, as a message; "" if there is none."""
    for name, t in adapters.items():
        first = name.rpartition(".lora_")[2].partition(".")[0].endswith("A")  # (r, n), and B is (n, r)
        if not t.is_floating_point() or t.dim() != 2 or t.shape[0 if first else 1] != joint.r:
            return f"{shortened(name)} has shape {shortened(tuple(t.shape))}, and lora.r={joint.r}"
    return ""


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
    if beside is None or _equal(inside, beside):
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
            if not _equal(ours.get(option), theirs.get(option)):
                differing.append(f"{table}.{shortened(option)} is {shown(ours.get(option))}, not "
                                 f"{shown(theirs.get(option))}")  # fmt: skip
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        logger.warning(
            "%s: the header of %s differs from %s, and the header counts: %s%s. To change options, change those of "
            "the head in memory and save it again", source, WEIGHTS, CONFIG, "; ".join(differing[:4]), more,
        )  # fmt: skip
    return agreed


def _equal(value: object, other: object) -> bool:
    try:
        return value == other
    except RecursionError:  # nested deeper than any option
        return False


def _checked(stored: dict[str, Any], where: Any, source: Any) -> dict[str, Any]:
    """A config as it was stored. CheckpointError if it is not a head's, or has values that no head's has."""
    if (kind := stored.get("model_type")) != SpecConfig.model_type:
        refuse_unread_kind(where, stored)
        raise CheckpointError(
            f"{where} is not the config of a draft head (model_type={shown(kind)}); for a base model train one, "
            f"`{shlex.join(['specheads', 'train', 'eagle3', f'base={source}'])}`, or begin one in Python with "
            "specheads.convert()"
        )
    known = {*_KEYS, "model_type", "architectures", *WITHOUT_EFFECT}
    if unknown := [name for name, value in stored.items() if value is not None and name not in known]:
        raise CheckpointError(
            f"{where} has {listing(unknown)}, which this version of specheads does not know; take a newer one, or take "
            "it away if it says nothing of the head"
        )
    for name in _TABLES:
        if not isinstance(stored.get(name) or {}, dict):
            raise CheckpointError(f"{where}: {name} must be a table of options, not {shown(stored[name])}")
    length = stored.get("trained_length")
    if length is not None and (type(length) is not int or not 1 <= length <= _MAX_LENGTH):
        raise CheckpointError(f"{where}: trained_length must be a whole number of tokens, not {shown(length)}")
    for name in _NAMES:
        value = stored.get(name)
        if value is not None and not (
            isinstance(value, str) and len(value) <= _MAX_NAME and min(value, default=" ") >= " "
        ):
            raise CheckpointError(f"{where}: {name} must be a name or a path, not {shown(value)}")
    return stored


def _absent(files: Files) -> CheckpointError:
    """Why these files are no checkpoint, although nothing in them is damaged."""
    folder = Path(files.source) / files.hub.get("subfolder", "")
    if folder.is_dir():
        if pickles := sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES):
            return CheckpointError(
                f"{folder} has no {WEIGHTS}; its pickles {pickles} are not loaded, since a pickle can run code"
            )
        return CheckpointError(f"{files} has no {WEIGHTS}: it is not a head checkpoint, or an unfinished one")
    if folder.is_file():
        return CheckpointError(f"{folder} is a file; give the folder of a checkpoint")
    if not may_be_repository(str(files)):
        return CheckpointError(
            f"{folder} is not a directory with {CONFIG} and {WEIGHTS}, nor a hub id (owner/name)"
            f"{did_you_mean(str(files), 'model')}"
        )
    try:
        hub_options(files.source, **files.hub)
    except FileNotFoundError as error:
        return CheckpointError(str(error))
    return CheckpointError(f"{files} is neither a directory nor a hub repository with {WEIGHTS}")
