"""One file of saved features: concatenated rows, each tensor with one line per token, in the chosen dtype.

Shapes: N tokens of all rows of a file, T tokens of a row, H hidden, K likeliest tokens saved.
input_ids, document_ids, position_ids (N,) int32; supervised (N,) bool; base_positions (N, 3)
int32, of a base that counts so beside images; starts (rows + 1,) int64; tap_k (N, H) for each
tapped layer; last_hidden (N, H), or topk_ids (N, K) int32 with topk_log_p (N, K) and topk_tail (N,). In float8_e4m3fn
each line has its own scale, <name>.scale (N,) float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specheads.files import replacing
from specheads.options import OptionError

FLOAT8 = torch.float8_e4m3fn
SCALE = ".scale"
CHECKSUM = "crc32"
_NUMBERS = ("input_ids", "document_ids", "position_ids", "base_positions", "topk_ids")


class FeatureError(OptionError):
    """Saved features that cannot be written or used; the message names the file and says what to do."""


def encode_states(name: str, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hidden states (T, H) as they are saved. float8: each line is scaled so that its largest entry is 448, the largest
    value; the error of an entry x is at most max(|x| / 16, largest / 448 / 1024)."""
    if dtype != FLOAT8:
        return {name: x.to("cpu", dtype)}
    limit = torch.finfo(FLOAT8).max
    scale = x.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * limit) / limit
    scaled = (x.float() / scale.unsqueeze(-1)).clamp(-limit, limit)
    return {name: scaled.to(FLOAT8).cpu(), name + SCALE: scale.cpu()}


def decode_states(x: Tensor, scale: Tensor | None) -> Tensor:
    """The inverse of `encode_states`, (T, H): float8 as bfloat16, which is finer; others unchanged."""
    return x if scale is None else (x.float() * scale.unsqueeze(-1)).to(torch.bfloat16)


def write(path: Path, rows: Sequence[Mapping[str, Tensor]]) -> None:
    """Write all rows of a file, each a dict of tensors with T lines, atomically. FeatureError on a full disk."""
    lengths = torch.tensor([0, *(len(row["input_ids"]) for row in rows)])
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    tensors = {name: t.int() if name in _NUMBERS else t for name, t in tensors.items()}
    write_tensors(path, {**tensors, "starts": lengths.cumsum(0)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors, with their checksum in the header; the index keeps a checksum of the header."""
    try:
        with replacing(path) as temporary:
            # One entry only: safetensors does not keep the order of several.
            save_file(dict(tensors), temporary, metadata={CHECKSUM: checksum(tensors)})
    except (OSError, SafetensorError) as error:
        raise FeatureError(
            f"{path} could not be written ({error}); the files before it are whole: make room and run the same "
            "command again: it resumes there"
        ) from error


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the tensors' bytes, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def check_contents(path: Path, tensors: Mapping[str, Tensor], expected: str | None) -> None:
    """FeatureError unless a file's tensors match its checksum; older files have none."""
    if expected is not None and (actual := checksum(tensors)) != expected:
        raise FeatureError(
            f"{path} is damaged: its contents have checksum {actual}, and {expected} was written; delete it and {AGAIN}"
        )


class Shard:
    """A file of saved rows, open for reading row by row. FeatureError, with its name, if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = safe_open(path, framework="pt")
            self.names = tuple(self.file.keys())
            self.checksum = (self.file.metadata() or {}).get(CHECKSUM)
            self.starts = self.file.get_tensor("starts").tolist()
            lines = {name: self.file.get_slice(name).get_shape()[0] for name in self.names if name != "starts"}
        except FileNotFoundError as error:
            raise FeatureError(f"{path} is missing; copy it again, or {AGAIN}") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise FeatureError(f"{path} is damaged or cut short ({error}); delete it and {AGAIN}") from error
        if set(lines.values()) != {self.starts[-1]} or "input_ids" not in lines:
            raise FeatureError(f"{path} is damaged: its tensors have {lines} lines; delete it and {AGAIN}")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def check(self) -> None:
        """Read the whole file, and refuse it if a single bit has changed."""
        check_contents(self.path, {name: self.file.get_tensor(name) for name in self.names}, self.checksum)

    def row(self, i: int, names: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors of row i; hidden states as in `decode_states`."""
        here = slice(self.starts[i], self.starts[i + 1])
        row = {}
        for name in names:
            scale = self.file.get_slice(name + SCALE)[here] if name + SCALE in self.names else None
            row[name] = decode_states(self.file.get_slice(name)[here], scale)
        return row

    def whole(self, name: str) -> Tensor:
        """One tensor of all rows, (N, …)."""
        return self.file.get_tensor(name)


AGAIN = "run the command that saved the features again: it writes what is missing"


def file_fingerprint(path: Path) -> dict[str, Any]:
    """What the index records of a file: its size and a checksum of its header, which reveal a replaced or truncated
    file without reading it."""
    try:
        with open(path, "rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), 1 << 26))
            size = file.seek(0, 2)
    except FileNotFoundError as error:
        raise FeatureError(f"{path} is missing; copy it again, or {AGAIN}") from error
    return {"file": path.name, "bytes": size, "header": f"{zlib.crc32(length + header):08x}"}
