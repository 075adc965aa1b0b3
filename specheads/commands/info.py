"""`specheads info`: what a head checkpoint holds, or what is here: versions, devices, the shipped checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads import corpus, saved_head
from specheads.bench.environment import environment
from specheads.heads import HEADS


def system_record() -> dict[str, Any]:
    """environment(), the known heads, and the shipped checkpoints with their sizes."""
    try:
        folder = corpus.checkpoints_dir()
        found = {p.name: f"{_megabytes(p):.1f} MB" for p in sorted(folder.iterdir()) if (p / "config.json").is_file()}
    except FileNotFoundError:
        found = {}
    return {**environment(), "heads": list(HEADS), "shipped_checkpoints": found or "none"}


def checkpoint_record(path: Path) -> dict[str, Any]:
    """What the head checkpoint in the directory `path` holds. CheckpointError where it is none."""
    if not path.is_dir():
        raise saved_head.CheckpointError(f"{path} is not a directory; give one that save_pretrained() wrote")
    saved = saved_head.read(path)
    options = {name: value for name, value in saved.head.to_dict().items() if name != "kind"}
    weights = [t for t in saved.tensors.values() if t.is_floating_point()]
    tap = options.get("tap")
    return {
        "kind": saved.head.kind,
        "base": saved.config.base_model_name_or_path,
        "base_revision": saved.config.base_revision,
        "base_fingerprint": saved.config.base_fingerprint,
        "parameters": sum(t.numel() for t in weights),
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in weights}),
        "megabytes": round(_megabytes(path), 2),
        "tapped_layers": list(options.get("taps") or ([] if tap is None else [tap])),
        "draft_vocabulary": options.get("draft_vocab_size") or options.get("vocab_size"),
        "options": options,
    }


def show(record: dict[str, Any]) -> None:
    """One line a value on stdout."""
    width = max(map(len, record))
    for name, value in record.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        print(f"{name.replace('_', ' '):<{width}}  {value}")


def _megabytes(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) / 1e6
