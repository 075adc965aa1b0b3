"""The safetensors file of a checkpoint, which may be a stranger's: names, shapes and dtypes first, then the values."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specheads.options import OptionError, listing, reason, shortened

MOST_JSON = 4 << 20  # bytes of a config; those of heads are of a few thousand
_MOST_HEADER = 16 << 20  # bytes of names and shapes; a head of 64 layers has some 100,000
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointError(OptionError):
    """A head checkpoint that cannot be used; the message says what is wrong with which file."""


def damaged(path: Any, error: Exception | str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short ({reason(error)}); copy or train it again")


def header(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a safetensors file as one on the meta device, without its values, and the file's metadata."""
    try:
        with open(path, "rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
        if _MOST_HEADER < size <= Path(path).stat().st_size:
            raise CheckpointError(f"{path} has a header of {size:,} bytes; that of a head has {_MOST_HEADER:,} at most")
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error
    return {name: meta(path, name, shape, DTYPES.get(dtype, dtype)) for name, (shape, dtype) in found.items()}, metadata


def tensors_of(path: Path | str, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, which are views of the file: copy what is to stay."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def meta(path: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A tensor without values. CheckpointError where no head has that dtype, or nothing that shape."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise CheckpointError(f"{path}: {shortened(name)} is {shortened(dtype)}; expected {', '.join(DTYPES)}")
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        raise damaged(path, f"{shortened(name)} has shape {shortened(shape)}") from error


def widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of the floating point tensors; of several, the one that holds the values of all exactly."""
    return functools.reduce(torch.promote_types, {t.dtype for t in tensors if t.is_floating_point()})


def refuse_nonfinite(source: Any, tensors: dict[str, Tensor], allowable: bool = True) -> None:
    """CheckpointError that names the tensors with NaN or Inf among their values. Reads each once, and allocates
    nothing. allowable: allow_nonfinite would have passed them."""
    found = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all()
    ]
    if found:
        hint = ", or load it as it is with {allow_nonfinite}" if allowable else ""
        raise CheckpointError(
            f"{source}: NaN or Inf in {listing(found)}; copy or train it again{hint}", allow_nonfinite=True
        )
