"""The files of a head checkpoint and of its training run: their names, and how to read them without trusting them.

Names, shapes and dtypes are read and checked before any values.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specheads.heads import DraftHead
from specheads.options import OptionError, Suggestion, listing, reason, shortened

WEIGHTS, CONFIG = "model.safetensors", "config.json"
RESULTS, STATE, RECIPE, CURVES = "results.json", "trainer_state.json", "recipe.yaml", "curves.png"  # of a run
MAX_JSON = 4 << 20  # bytes of a config; a head's has a few thousand
_MAX_HEADER = 16 << 20  # bytes of names and shapes; a head of 64 layers needs some 100,000
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip

WIDE = ("e_score_correction_bias",)  # suffixes of tensor names that keep their own dtype
_QUANTISED = re.compile(r"F[468]_|F[46]$|float[48]_|\bI8|\bU8|u?int8")  # dtypes that store weights in 8 bits or fewer


class CheckpointError(OptionError):
    """A head checkpoint that cannot be used. The message names the file and what is wrong with it."""


def refuse_below_file(folder: Path) -> None:
    """CheckpointError for a folder that cannot be created because part of its path is a file."""
    there = next((path for path in folder.absolute().parents if path.exists()), folder)  # "/" has no parents
    if not there.is_dir():
        raise CheckpointError(f"{there} is a file, and nothing can be written below it; give another folder")


def refuse_nonempty(folder: Path, purpose: str) -> None:
    """CheckpointError unless the folder is empty or new. purpose: for the message, such as "export into"."""
    refuse_below_file(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty directory; give a new one to {purpose}")


def damaged_error(path: Any, error: Exception | str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short ({reason(error)}); copy or train it again")


def read_header(path: Path | str, names: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a safetensors file as a meta tensor, without its values, and the file's metadata.

    names: return only these tensors."""
    with _opened(path) as file:
        wanted = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118 (not a dict)
        slices = {name: file.get_slice(name) for name in wanted}
        stored = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        metadata = file.metadata() or {}
    shapes = {name: meta_tensor(path, name, shape, DTYPES.get(dtype, dtype)) for name, (shape, dtype) in stored.items()}
    return shapes, metadata


def read_names(path: Path | str) -> list[str]:
    """The names of a safetensors file's tensors, whatever their dtypes."""
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[Any]:
    """Open a safetensors file, checking that its header is complete and no larger than a head's can be."""
    try:
        with open(path, "rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
        if _MAX_HEADER < size <= Path(path).stat().st_size:
            raise CheckpointError(f"{path} has a header of {size:,} bytes; a head's has at most {_MAX_HEADER:,}")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise damaged_error(path, error) from error


def read_tensors(path: Path | str, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a safetensors file. They are views of the file: copy what should outlive it."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise damaged_error(path, error) from error


def meta_tensor(path: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A meta tensor. CheckpointError for a dtype that no head has, or an impossible shape."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        if _QUANTISED.search(str(dtype)):
            raise CheckpointError(
                f"{path}: {shortened(name)} is quantised ({shortened(dtype)}), and heads here are not; take a copy in "
                "bfloat16"
            )
        raise CheckpointError(f"{path}: {shortened(name)} is {shortened(dtype)}; expected {', '.join(DTYPES)}")
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        raise damaged_error(path, f"{shortened(name)} has shape {shortened(shape)}") from error


def widest_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The narrowest dtype that holds the values of all floating point tensors exactly."""
    return functools.reduce(torch.promote_types, {t.dtype for t in tensors if t.is_floating_point()})


def changes_dtype(name: str, tensor: Tensor) -> bool:
    """Does this tensor of a head take the dtype of the head's layers?"""
    return tensor.is_floating_point() and not name.endswith(WIDE)


def refuse_nonfinite(source: Any, tensors: dict[str, Tensor], allowable: bool = True) -> None:
    """CheckpointError that names the tensors with NaN or Inf. Reads each tensor once, without temporaries of its size.

    allowable: whether allow_nonfinite would accept them; the message then says so."""
    wrong = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all()
    ]
    if wrong:
        hint = ", or load it as it is with {allow_nonfinite}" if allowable else ""
        raise CheckpointError(
            f"{source}: NaN or Inf in {listing(wrong)}; copy or train it again{hint}", allow_nonfinite=Suggestion(True)
        )


def read_table(path: Path, most: int | None = MAX_JSON) -> dict[str, Any] | None:
    """The JSON object in a file; None if it holds none. CheckpointError if it has more than `most` bytes.

    most: None (no limit) for files that we wrote ourselves."""
    if most is not None and (size := path.stat().st_size) > most:
        raise CheckpointError(f"{path} has {size:,} bytes; expected at most {most:,}")
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # no JSON, or nested deeper than any config
        return None
    return table if isinstance(table, dict) else None


def parse_table(text: str | bytes, where: Any) -> dict[str, Any]:
    """The JSON object in a text; {} if it is another value. CheckpointError if it is no JSON, or too long."""
    if len(text) > MAX_JSON:
        raise CheckpointError(f"{where} has a config of more than {MAX_JSON:,} bytes; a head's has thousands")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested deeper than any config
        raise CheckpointError(f"{where} is not JSON ({reason(error)}); copy or save the checkpoint again") from error
    return table if isinstance(table, dict) else {}


def absolute(name: str) -> str:
    """The absolute path of a local folder; any other name, such as a hub id, unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def is_local(name: str) -> bool:
    """Is it a local path, whether or not anything exists there?"""
    return name.startswith(".") or Path(name).is_absolute() or Path(name).is_dir()


def make_portable(name: str | None, folder: Path) -> str | None:
    """The path of a local base relative to the checkpoint, so that both can be moved together; a hub id unchanged."""
    if name is None or not is_local(name):
        return name
    relative = os.path.relpath(Path(name).resolve(), folder.resolve())
    return relative if relative.startswith(".") else f"./{relative}"


def run_of(checkpoint: Any, head: DraftHead) -> Path | None:
    """The folder that the head was loaded from; None if there is none, or if its weights are no longer this head's, as
    after more training in memory, so that its metrics do not apply."""
    folder = Path(str(checkpoint or ""))
    if not checkpoint or not (folder / WEIGHTS).is_file():
        return None
    saved = read_tensors(folder / WEIGHTS, read_names(folder / WEIGHTS))
    for name, tensor in head.state_dict().items():
        there = saved.get(f"head.{name}")
        if there is None or not torch.equal(there.to(tensor.dtype), tensor.to("cpu")):
            return None
    return folder


def accepted_length(checkpoint: Any) -> float | None:
    """The accepted length that training measured on held-out rows; None if the checkpoint's folder has none."""
    folder = Path(str(checkpoint or ""))
    if not checkpoint or not folder.is_dir():
        return None
    length = results(folder).get("eval_accepted_length")
    if isinstance(length, int | float):
        return float(length)
    lengths = [log.get("eval_accepted_length") for log in reversed(history(folder))]
    return next((float(length) for length in lengths if isinstance(length, int | float)), None)


def results(run: Path) -> dict[str, Any]:
    """The final metrics of a run; {} if its folder has none."""
    return _table(run / RESULTS)


def history(run: Path) -> list[dict[str, Any]]:
    """The whole log of a run (some megabytes); [] if its folder has none."""
    return [log for log in _table(run / STATE).get("log_history") or () if isinstance(log, dict)]


def numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers: an untrusted file, or one from another program, may hold anything."""
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _table(path: Path) -> dict[str, Any]:
    return (read_table(path, most=None) or {}) if path.is_file() else {}
