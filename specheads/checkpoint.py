"""Save and load a head: one safetensors file and config.json, written so that a crash leaves the old ones or none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from specheads.target import text_config

if TYPE_CHECKING:
    from specheads.convert import SpecConfig, SpecModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FINGERPRINT = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
logger = hf_logging.get_logger(__name__)


class CheckpointError(ValueError):
    """A head checkpoint that cannot be used; the message says what is wrong with which file."""


def fingerprint(base: PreTrainedModel) -> dict[str, Any]:
    """What identifies a base: the sizes in its config, and a digest of a few weights (None while they are on meta)."""
    config = text_config(base)
    record = {name: getattr(config, name, None) for name in _FINGERPRINT}
    norms = [p for name, p in base.named_parameters() if p.ndim == 1 and not p.is_meta][-1:]
    rows: Tensor = base.get_input_embeddings().weight
    if rows.is_meta or rows.ndim != 2 or not rows.is_floating_point():
        return {**record, "weights": None}
    # In bfloat16, so that the dtype a base is loaded in does not change what it is.
    sample = [rows.detach()[:: max(1, len(rows) // 16), :64].flatten(), *(p.detach().flatten()[:256] for p in norms)]
    values = torch.cat([s.to("cpu", torch.bfloat16).float() for s in sample])
    return {**record, "weights": hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is gone when it does not."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def head_tensors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's part of a SpecModel's state dict, under the names it has there, contiguous and on the CPU."""
    return {name: t.detach().to("cpu").contiguous() for name, t in state_dict.items() if name.startswith("head.")}


def save(model: SpecModel, directory: Any, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write the head of `model`. state_dict: gathered by a launcher that shards parameters, else the model's own.

    The weights file carries the config too and is replaced in one step, so that the two files cannot disagree.
    """
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a directory to save into")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors(model.head_state_dict() if state_dict is None else state_dict)
    wanted = {name: t.shape for name, t in model.head_state_dict().items()}
    empty = [name for name, t in tensors.items() if t.numel() == 0 and wanted.get(name, t.shape).numel()]
    missing = sorted(set(wanted) - set(tensors))
    if empty or missing:
        raise CheckpointError(
            f"the state dict to save lacks the tensors {(empty or missing)[:4]}: with sharded parameters gather them "
            "first (DeepSpeed ZeRO-3: stage3_gather_16bit_weights_on_model_save: true)"
        )
    config = model.config.to_dict()
    config["base_model_name_or_path"] = _portable(model.config.base_model_name_or_path, folder)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    with replacing(folder / WEIGHTS) as path:
        save_file(tensors, path, metadata={"format": "pt", "specheads_config": json.dumps(config)})
    with replacing(folder / CONFIG) as path:
        path.write_text(text, "utf8")


def _portable(name: str | None, folder: Path) -> str | None:
    """A local base is named relative to the checkpoint, so that both can move together; a hub id stays."""
    if name is None or not Path(name).is_dir():
        return name
    relative = os.path.relpath(Path(name).resolve(), folder.resolve())
    return relative if relative.startswith(".") else f"./{relative}"


def load(
    source: Any,
    *,
    base: PreTrainedModel | str | None = None,
    config: SpecConfig | None = None,
    dtype: Any = None,
    **kwargs: Any,
) -> SpecModel:
    """Base + head from a directory or hub id. Raises CheckpointError with what is wrong and where."""
    from specheads.convert import SpecConfig, SpecModel, build_head

    names = ("revision", "token", "cache_dir", "local_files_only", "force_download")
    hub: dict[str, Any] = {name: kwargs.pop(name) for name in names if name in kwargs}
    weights = _find(source, WEIGHTS, hub)
    tensors, stored = _read(weights)
    stored = stored or json.loads(Path(_find(source, CONFIG, hub)).read_text("utf8"))
    if stored.get("model_type") != SpecConfig.model_type:
        raise CheckpointError(
            f"{source} is not a specheads checkpoint: its config says model_type={stored.get('model_type')!r}; "
            "a base model is given a head with convert()"
        )
    recorded = SpecConfig.from_dict(stored)
    torch_dtype = kwargs.pop("torch_dtype", None)
    dtype = dtype if dtype is not None else torch_dtype
    if base is None:
        base = _base_of(recorded, Path(weights).parent)
    if isinstance(base, str | Path):
        try:
            base = AutoModelForCausalLM.from_pretrained(
                base, dtype=dtype if dtype is not None else "auto", revision=recorded.base_revision,
                **{k: hub[k] for k in ("token", "cache_dir", "local_files_only") if k in hub}, **kwargs,
            )  # fmt: skip
        except OSError as error:
            raise CheckpointError(
                f"the base model {str(base)!r} that {source} was trained for cannot be loaded ({error}); "
                "give another with base=..."
            ) from error
    check_base(recorded, base, source)
    head = build_head(recorded.head_config(), base)
    model = SpecModel(recorded, base, head)
    load_head_tensors(model, tensors, source)
    model.head.to(dtype if isinstance(dtype, torch.dtype) else base.dtype)
    model.config.base_model_name_or_path = getattr(base, "name_or_path", None) or recorded.base_model_name_or_path
    return model.eval()


def check_base(config: SpecConfig, base: PreTrainedModel, source: Any) -> None:
    """CheckpointError if the base has other sizes than the one the head was trained for; a warning if only its
    weights differ (a fine-tune of it: the text stays right, fewer drafts are accepted)."""
    own = fingerprint(base)
    differing = {
        name: (value, own.get(name))
        for name, value in config.base_fingerprint.items()
        if name != "weights" and value != own.get(name)
    }
    if differing:
        details = ", ".join(f"{name} is {there!r}, not {value!r}" for name, (value, there) in differing.items())
        raise CheckpointError(f"{source} was trained for another base ({config.base_model_name_or_path}): {details}")
    weights = config.base_fingerprint.get("weights")
    if weights and own["weights"] and weights != own["weights"]:
        logger.warning(
            "%s was trained for %s, whose weights differ from this base's: the text will be right, but fewer drafts "
            "will be accepted than its card says", source, config.base_model_name_or_path,
        )  # fmt: skip


def load_head_tensors(model: SpecModel, tensors: dict[str, Tensor], source: Any) -> None:
    """Put `head.*` tensors into the model, every one of them and no other. CheckpointError names what does not fit."""
    wanted = model.head_state_dict()
    missing, unexpected = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or unexpected:
        parts = [f"missing {missing}" if missing else "", f"unexpected {unexpected}" if unexpected else ""]
        raise CheckpointError(f"{source}: the tensors do not fit its head: {'; '.join(filter(None, parts))}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            expected = tuple(wanted[name].shape)
            raise CheckpointError(f"{source}: {name} has shape {tuple(tensor.shape)}, its config asks for {expected}")
    # The head takes the dtype it was saved in.
    floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
    model.head.to(floating[0])
    model.head.load_state_dict({name.removeprefix("head."): t for name, t in tensors.items()}, strict=True)


def _base_of(config: SpecConfig, folder: Path) -> str:
    name = config.base_model_name_or_path
    if not name:
        raise CheckpointError(f"{folder} does not name the base it was trained for; give it with base=...")
    if name.startswith("."):
        local = (folder / name).resolve()
        if not local.is_dir():
            raise CheckpointError(f"the base model of {folder} is not at {local}; give its place with base=...")
        return str(local)
    return name


def _find(source: Any, name: str, hub: dict[str, Any]) -> str:
    folder = Path(source)
    if folder.is_dir():
        if (folder / name).is_file():
            return str(folder / name)
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        if name == WEIGHTS and pickles:
            raise CheckpointError(
                f"{folder} holds the pickle {pickles[0]} and no {WEIGHTS}; pickles can run code and are not loaded"
            )
        raise CheckpointError(f"{folder} has no {name}: not a head checkpoint, or one that was never finished")
    if folder.is_file() or str(source).startswith((".", "/")):
        raise CheckpointError(f"{source} is not a directory with {CONFIG} and {WEIGHTS}, nor a hub id")
    try:
        found = cached_file(str(source), name, **hub)
    except OSError as error:
        raise CheckpointError(f"{source} is neither a directory nor a hub repository with {name}: {error}") from error
    assert found is not None
    return found


def _read(path: str) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors of a weights file, and the config in its header."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); copy or train it again") from error
    return tensors, json.loads(metadata["specheads_config"]) if "specheads_config" in metadata else None
