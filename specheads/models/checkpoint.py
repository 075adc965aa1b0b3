"""Save and load a head: one safetensors file and config.json. A crash while saving leaves the old files or none.

Loading has four steps, for our format and foreign ones alike: read the files, find the base and check that they fit it,
build the head, and place it beside the base.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.verify.hf_base import refuse_unsupported, text_config, unwrapped
from specheads.decoding.verify.model_inputs import input_device
from specheads.files import replacing
from specheads.heads import HEADS, DraftHead, HeadConfig
from specheads.hub import hub_options
from specheads.models.base.fingerprint import fingerprint_base, record_base, weights_differ
from specheads.models.base.loading import as_dtype, load_language_model, quantization_options
from specheads.models.base.lora import JointConfig, adapted_modules, attach, detach, is_adapter
from specheads.models.config import SpecConfig
from specheads.models.files import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    changes_dtype,
    is_local,
    make_portable,
    read_table,
    refuse_below_file,
    refuse_nonfinite,
    widest_dtype,
)
from specheads.models.formats.files import Files
from specheads.models.formats.importing import find_foreign
from specheads.models.saved_head import (
    SavedHead,
    read,
    read_files,
    select_adapters,
    select_head,
    state_dict_mismatches,
)
from specheads.options import listing, reason, shortened, shown

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
logger = hf_logging.get_logger(__name__)


class LoadedParts(NamedTuple):
    """What load() returns: the model's config, and its base and head with their weights."""

    config: SpecConfig
    base: PreTrainedModel
    head: DraftHead


def save(
    directory: Any, config: SpecConfig, head: HeadConfig, state_dict: dict[str, Tensor], names: Collection[str],
    *, names_local_base: bool = True,
) -> None:  # fmt: skip
    """Write the head and its adapters from the state dict of a SpecModel. names: the tensors to be saved.
    names_local_base: does config.json name a base that is in a local folder?

    The weights file holds the config too and is replaced in one step, so a crash leaves a consistent checkpoint.
    """
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a directory to save into")
    refuse_below_file(folder)
    sharded = any(hasattr(t, "full_tensor") for name, t in state_dict.items() if name.startswith("head."))
    tensors = {} if sharded else select_head(state_dict)
    if sharded or (differing := state_dict_mismatches(tensors, head)):
        raise CheckpointError(
            "the state dict to save does not hold the whole head: "
            f"{'its tensors are shards' if sharded else differing}. Gather sharded parameters first: "
            "state_dict=accelerator.get_state_dict(model); with DeepSpeed ZeRO-3 set "
            "stage3_gather_16bit_weights_on_model_save: true"
        )
    if config.joint is not None:
        tensors |= select_adapters(state_dict)
        if missing := sorted(set(names) - set(tensors)):
            raise CheckpointError(f"the state dict to save does not hold the adapters {', '.join(missing[:4])}")
    _refuse_other_models(folder)
    folder.resolve().mkdir(parents=True, exist_ok=True)  # a link may point to a folder that does not exist yet
    written = config.to_diff_dict()
    written["head"] = head.to_dict()  # as it is in memory now
    named = config.base_model_name_or_path
    written["base_model_name_or_path"] = make_portable(
        named if named and (names_local_base or not is_local(named)) else None, folder
    )
    _write(folder, written, tensors)


def save_default_tree(directory: Any, tree: tuple[tuple[int, ...], ...]) -> None:
    """Make the static tree of these choices the default of the checkpoint in `directory`; all else, such as the base it
    names, stays as it was saved."""
    saved = read(directory)
    saved.config.head = saved.config.head | {"tree": replace(saved.head, tree=tree).tree}
    _write(saved.folder, saved.config.to_diff_dict(), saved.tensors)


def correct_copied_name(source: Path, copy: Path) -> None:
    """If `copy` has the config.json of the checkpoint in `source`, make its path to a local base relative to `copy`."""
    text, path = (source / CONFIG).read_text("utf8"), copy / CONFIG
    name = json.loads(text)["base_model_name_or_path"]
    if not path.is_file() or path.read_text("utf8") != text or not name or not is_local(name):
        return
    config = json.loads(text) | {"base_model_name_or_path": make_portable(str(source / name), copy)}
    _write_config(copy, config)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    with replacing(folder / WEIGHTS) as path:
        save_file(tensors, path, metadata={"format": "pt", "specheads_config": json.dumps(config)})
    _write_config(folder, config)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    with replacing(folder / CONFIG) as path:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf8")


def _refuse_other_models(folder: Path) -> None:
    """CheckpointError for a folder that holds another model, such as the base, which saving would overwrite."""
    if not (folder / CONFIG).is_file() or (there := read_table(folder / CONFIG, most=None)) is None:
        return  # a truncated config is overwritten
    if (kind := there.get("model_type")) != SpecConfig.model_type:
        what = f"a {shortened(kind)} model" if kind else "another program's model"
        raise CheckpointError(f"{folder} holds {what}, which the head's files would replace; save elsewhere")


def load(
    source: Any,
    *,
    base: PreTrainedModel | str | os.PathLike[str] | None = None,
    config: SpecConfig | None = None,
    dtype: torch.dtype | str | None = None,
    allow_pickle: bool = False,
    allow_nonfinite: bool = False,
    **kwargs: Any,
) -> LoadedParts:
    """Load config, base and head from a directory or hub id, in this library's format or one of formats/.

    dtype: of both, or only of the head if the base is in memory. None: the base as it was saved, and the head in the
    base's dtype; "auto": each as it was saved.
    config: the checkpoint's, as Auto classes pass it; only its attention implementation is used, since the weights
    file has its own config. allow_pickle: read a foreign format's pickles too, tensors only. allow_nonfinite: accept
    NaN and Inf among the head's weights. Other arguments are for loading the base. CheckpointError says what is wrong
    and where.
    """
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if kwargs.get(name) is not None}
    for name in (*_HUB_OPTIONS, "_from_auto", "adapter_kwargs"):  # they are for the head's repository, not the base's
        kwargs.pop(name, None)
    torch_dtype = kwargs.pop("torch_dtype", None)
    dtype = torch_dtype if dtype is None else dtype
    wanted_dtype, follows_base = as_dtype(dtype), dtype is None
    if config is not None and config._attn_implementation:
        kwargs.setdefault("attn_implementation", config._attn_implementation)
    options = {"dtype": wanted_dtype or "auto", **kwargs}

    files, in_memory = Files(source, hub, allow_pickle), isinstance(base, torch.nn.Module)
    if (foreign := find_foreign(files)) is not None:
        location = foreign.base_location if base is None else {}
        named = SpecConfig(base_model_name_or_path=foreign.base_name, base_revision=location.pop("revision", None))
        base = _find_base(files, base, named, options | location)
        refuse_unsupported(base)
        head_config, tensors = foreign.read(base, allow_nonfinite)
        recorded = record_base(SpecConfig.of(head_config), base)
        head = build_head(head_config, base, tensors)
        head.refuse_unfit(base)
    else:
        saved = read_files(files)
        # Only in the head are NaN and Inf ever accepted: with such adapters the base could not decode.
        suspect = select_adapters(saved.tensors) if allow_nonfinite else saved.tensors
        refuse_nonfinite(source, suspect, allowable=not allow_nonfinite)
        recorded = saved.config
        recorded.base_model_name_or_path = _resolved(recorded, saved.folder)
        if base is not None:
            recorded.base_revision = None  # it belongs to the recorded one
        base = _find_base(files, base, recorded, options)
        fingerprint = fingerprint_base(base)
        check_base(recorded, fingerprint, source)
        check_options(saved, base, source)
        record_base(recorded, base, fingerprint)
        recorded.name_or_path = str(source)
        if recorded.joint is not None:
            _attach_saved(saved, base, wanted_dtype, source)
            if in_memory:
                logger.warning(
                    "%s was trained together with adapters of its base: they are part of the %s given in memory from "
                    "now on, whose own text changes", source, type(base).__name__,
                )  # fmt: skip
        head = build_head(saved.head, base, select_head(saved.tensors))
    return LoadedParts(recorded, base, in_dtype(head, base.dtype if follows_base else wanted_dtype))


def build_head(config: HeadConfig, base: PreTrainedModel, tensors: dict[str, Tensor] | None = None) -> DraftHead:
    """A head with these (complete) options, on the base's input device.

    tensors: all of its tensors, by its own names or a SpecModel's; they are copied."""
    device = input_device(base)
    with torch.device(device):
        head = HEADS[config.kind](config)
    if tensors is not None:
        # Copied, since tensors of a safetensors file are views of the file, which may be overwritten later. Converted
        # to one dtype, which layers need: the widest, which holds every value exactly.
        in_layers = {name for name, t in tensors.items() if changes_dtype(name, t)}
        dtype = widest_dtype([tensors[name] for name in in_layers])
        copies = {
            name.removeprefix("head."): t.to(device, dtype if name in in_layers else None, copy=True)
            for name, t in tensors.items()
        }
        head.load_state_dict(copies, strict=True, assign=True)
    return head


def _attach_saved(saved: SavedHead, base: PreTrainedModel, dtype: torch.dtype | None, source: Any) -> None:
    """Put the saved adapters on the base, in `dtype` or the one they were saved in (the widest if several).
    CheckpointError, leaving the base as it was, if they do not fit it."""
    tensors = select_adapters(saved.tensors)
    # From the tensors' names, not from target_modules, which may be a regular expression from an untrusted file.
    if not (modules := adapted_modules(tensors)):
        raise CheckpointError(f"{source}: its config has adapters (joint), and its weights have none")
    assert saved.config.joint is not None
    try:
        attach(base, replace(JointConfig.of(saved.config.joint), target_modules=modules))
    except ValueError as error:
        raise CheckpointError(f"{source}: {reason(error)}") from error
    adapters = {f"base.{name}": parameter for name, parameter in base.named_parameters() if is_adapter(name)}
    wrong = sorted(set(adapters) ^ set(tensors)) or [n for n, t in tensors.items() if t.shape != adapters[n].shape]
    if wrong:
        detach(base)
        raise CheckpointError(f"{source}: its adapters do not fit the base: {listing(wrong)}")
    for name, tensor in tensors.items():
        adapters[name].data = tensor.to(adapters[name].device, dtype or widest_dtype(tensors.values()), copy=True)


def in_dtype(head: DraftHead, dtype: torch.dtype | None) -> DraftHead:
    """The head in this dtype; unchanged for None, and for the 8-bit storage dtype of a quantised base."""
    return head if dtype is None or dtype.itemsize < 2 else head.to(dtype)


def check_options(saved: SavedHead, base: PreTrainedModel, source: Any) -> None:
    """CheckpointError if the head's options leave out a size, or need layers or tokens that the base lacks."""
    try:
        filled = saved.head.with_base_defaults(text_config(base))
    except ValueError as error:
        raise CheckpointError(f"{source}: its head does not fit this base: {reason(error)}") from error
    if filled != saved.head:
        left_out = [name for name, value in asdict(saved.head).items() if value != getattr(filled, name)]
        raise CheckpointError(f"{source}: its config leaves sizes of the head out: {', '.join(left_out)}")


def check_base(config: SpecConfig, own: dict[str, Any], source: Any) -> None:
    """Compare the fingerprint `own` of a base with the one that the head was trained for.

    CheckpointError if sizes differ. A warning if only weights differ, as in a fine-tune: fewer drafts are accepted,
    though the text is right (unless there are adapters, which change it)."""
    of_head = {name: config.head[name] for name in ("hidden_size", "vocab_size") if config.head.get(name)}
    recorded = {**of_head, **config.base_fingerprint}
    weights = recorded.pop("weights", None)
    differing = [
        f"{shortened(name)} is {own.get(name)!r}, not {shown(value)}"
        for name, value in recorded.items()
        if value != own.get(name)
    ]
    if differing:
        named = f" ({shortened(config.base_model_name_or_path)})" if config.base_model_name_or_path else ""
        raise CheckpointError(f"{source} was trained for another base{named}: {', '.join(differing[:12])}")
    if weights_differ(weights, own["weights"]):
        text = "the text will be right, but" if config.joint is None else "its adapters were not made for it, and"
        logger.warning(
            "%s was trained for %s, whose weights differ from this base's: %s fewer drafts will be accepted than its "
            "card says", source, shortened(config.base_model_name_or_path or "another base"), text,
        )  # fmt: skip


def _find_base(files: Files, base: Any, config: SpecConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The base for the head in `files`: given in memory, or loaded by the name in `base` or in the config.

    ValueError for loading options, other than dtype, with a base in memory."""
    if base is not None and not isinstance(base, str | os.PathLike):
        if ignored := sorted(name for name, value in options.items() if value and name != "dtype"):
            raise ValueError(f"{ignored} would have no effect on a base that is already in memory; leave them out")
        return unwrapped(base)
    recorded = config.base_model_name_or_path or ""
    if not (name := recorded if base is None else os.fspath(base)):
        raise CheckpointError(f"{files} does not name the base it was trained for; give it with {{base}}", base=...)
    if base is None and Path(name).is_absolute() and not Path(name).is_dir():
        raise CheckpointError(
            f"the base model of {files} is not at {shortened(name)}; give its path with {{base}}", base=...
        )
    shared = {k: files.hub[k] for k in ("token", "cache_dir", "local_files_only", "proxies") if k in files.hub}
    revision = {"revision": config.base_revision} if base is None and config.base_revision else {}
    try:
        location = hub_options(name, **shared) | shared
        if base is None and not {"quantization_config", "quantize"} & options.keys():
            options = options | quantization_options(config.base_quantization, name, **revision, **location)
        return unwrapped(load_language_model(name, class_name=config.base_class, **revision, **location, **options))
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and base is not None:
            raise  # it is about the arguments, not about a file
        raise CheckpointError(
            f"the base model {shown(name)} of {files} cannot be loaded; give another with {{base}} ({reason(error)})",
            base=...,
        ) from error


def _resolved(config: SpecConfig, folder: Path) -> str | None:
    name = config.base_model_name_or_path
    return str((folder / name).resolve()) if name and name.startswith(".") else name
