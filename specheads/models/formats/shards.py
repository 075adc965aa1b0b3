"""Tensors split over several safetensors files, and the index that says which file holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specheads.models.files import WEIGHTS, CheckpointError, read_table
from specheads.options import shortened, shown

INDEX, PICKLE_INDEX = f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json"
_MOST = 64  # files
_MOST_BYTES = 64 << 20  # of an index; one of 100,000 tensors has some 10 million
_NAME = re.compile(r"\w[\w. -]{0,200}\.safetensors")  # of a file beside the index: no path, no drive


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Tensor name → name of its file, and the metadata, from an index. CheckpointError if the file is not an index."""
    read = read_table(path, _MOST_BYTES) or {}
    found, metadata = read.get("weight_map"), read.get("metadata")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path} is not an index of tensors: it has no weight_map of names")
    return found, metadata if isinstance(metadata, dict) else {}


def refuse_paths(path: Path, index: dict[str, str], tensors: Collection[str]) -> None:
    """CheckpointError if the index puts one of these tensors anywhere but in a file beside itself."""
    for tensor in tensors:
        name = index[tensor]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{path} has {shortened(tensor)} in {shown(str(name))}; "
                "expected the name of a .safetensors file beside it"
            )


def refuse_many(path: Path, index: dict[str, str]) -> None:
    """CheckpointError if the index names more files than any head has."""
    if (count := len(set(index.values()))) > _MOST:
        raise CheckpointError(f"{path} names {count} files; a head has at most {_MOST}")


def check_shard(index: Path, name: str, claimed: Collection[str], held: Collection[str]) -> None:
    """CheckpointError unless a file holds exactly the tensors that the index assigns to it: readers load all it has."""
    for what, names in (("lacks", set(claimed) - set(held)), ("also holds", set(held) - set(claimed))):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{index}: {name} {what} {shortened(min(names))}{more}, as the index has it; copy both again"
            )
