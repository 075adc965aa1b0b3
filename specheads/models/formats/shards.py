"""Tensors split over several safetensors files, and the index that says which file holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specheads.models.files import WEIGHTS, CheckpointError
from specheads.options import shortened, shown

INDEX = f"{WEIGHTS}.index.json"
_MOST = 64  # files
_NAME = re.compile(r"\w[\w. -]{0,200}\.safetensors")  # of a file beside the index: no path, no drive


def read_index(path: Path, table: dict[str, Any] | None) -> dict[str, str]:
    """Tensor name → name of its file, from an index, whose JSON is `table`. CheckpointError if it is no index, or names
    anything but files beside itself."""
    found = (table or {}).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path} is not an index of tensors: it has no weight_map of names")
    for tensor, name in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{path} has {shortened(tensor)} in {shown(str(name))}; "
                "expected the name of a .safetensors file beside it"
            )
    return found


def refuse_many(path: Path, index: dict[str, str]) -> None:
    """CheckpointError if an index names more files than a head has."""
    if (count := len(set(index.values()))) > _MOST:
        raise CheckpointError(f"{path} names {count} files; a head has at most {_MOST}")


def check_shard(index: Path, name: str, claimed: Collection[str], held: Collection[str]) -> None:
    """CheckpointError unless a file holds exactly the tensors that the index says: readers would load others too."""
    for what, names in (("lacks", set(claimed) - set(held)), ("also holds", set(held) - set(claimed))):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{index}: {name} {what} {shortened(min(names))}{more}, as the index has it; copy both again"
            )
