"""Which measured step costs hold for a model on this machine, and the automatic drafter that uses them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.planner.by_cost import CostKey, CostTable, costs_dir
from specheads.decoding.planner.by_cost.cost_file import device_name, digest
from specheads.decoding.verify.model_inputs import input_device
from specheads.heads import DraftHead
from specheads.models.base.fingerprint import fingerprint_base

_digests: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def cost_key(base: PreTrainedModel, head: DraftHead | None, *, compiled: bool = False) -> CostKey:
    if base not in _digests:
        _digests[base] = digest(fingerprint_base(base))
    dtype = str(base.dtype).removeprefix("torch.")
    return CostKey(
        _digests[base],
        head_digest(None if head is None else head.config.to_dict()),
        device_name(input_device(base)),
        dtype,
        compiled,
    )


def head_digest(options: dict[str, Any] | None) -> str:
    """The digest of a head's options, without its default tree; "none" without a head."""
    return "none" if options is None else digest({k: v for k, v in options.items() if k != "tree"})


def cost_path(key: CostKey) -> Path:
    """Where `specheads tune` writes the costs of this key unless told otherwise."""
    return costs_dir() / key.file_name


def auto_drafter(base: PreTrainedModel, head: DraftHead | None = None, costs: str | Path | None = None) -> AutoDrafter:
    """The automatic drafter for a base, with its head or with copies alone.

    costs: a file of `specheads tune`, used for compiled steps and others alike; None: those in the user's cache, if
    any. OSError or ValueError if the file cannot be read, or holds the costs of another model or machine.
    """
    keys = [cost_key(base, head, compiled=compiled) for compiled in (False, True)]
    if costs is not None:
        path = Path(costs)
        return AutoDrafter(head, _loaded(path, *keys, modified=path.stat().st_mtime_ns))
    paths = [cost_path(key) for key in keys]
    return AutoDrafter(
        head, *(_loaded(path, key, modified=path.stat().st_mtime_ns) if path.is_file() else None
                for path, key in zip(paths, keys, strict=True)),
    )  # fmt: skip


@cache
def _loaded(path: Path, *keys: CostKey, modified: int) -> CostTable:
    """Read the file once for each modification time."""
    return CostTable.load(path, *keys)


def cost_files(base_fingerprint: dict[str, Any], head: dict[str, Any]) -> list[Path]:
    """The files in the user's cache for a head with these options, beside the base of this fingerprint."""
    return sorted(costs_dir().glob(f"{digest(base_fingerprint)}-{head_digest(head)}-*.json"))
