"""What is here: the hardware and versions a figure belongs to, and what a head checkpoint holds."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from specheads import checkpoint, corpus
from specheads.heads import HEADS


def environment() -> dict[str, Any]:
    """Hardware and versions; no name of the machine or of a place on it."""
    import specheads

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "specheads": specheads.__version__,
    }


def line(record: dict[str, Any]) -> str:
    """`2 cores of AMD EPYC, 2 threads, load 0.4; Linux x86_64, Python 3.11.9, torch 2.13.0, …`."""
    where = f"{record['cores']} cores of {record['cpu']}, {record['torch_threads']} threads"
    if record["load_average"] is not None:
        where += f", load {record['load_average']}"
    where += "".join(f", {gpu}" for gpu in record["gpus"])
    versions = ", ".join(f"{name} {record[name]}" for name in ("torch", "transformers", "specheads"))
    return f"{where}; {record['system']}, Python {record['python']}, {versions}"


def _cpu_name() -> str:
    try:
        for entry in Path("/proc/cpuinfo").read_text("utf8").splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


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
        raise checkpoint.CheckpointError(f"{path} is not a directory; give one that save_pretrained() wrote")
    config, tensors, _ = checkpoint._read(path, {})
    head = config.head_config()
    if differing := checkpoint.misfits(tensors, head):
        raise checkpoint.CheckpointError(f"{path}: the tensors do not fit its head: {differing}")
    options = {name: value for name, value in head.to_dict().items() if name != "kind"}
    weights = {name: t for name, t in tensors.items() if t.is_floating_point()}
    tap = options.get("tap")
    return {
        "kind": head.kind,
        "base": config.base_model_name_or_path,
        "base_revision": config.base_revision,
        "base_fingerprint": config.base_fingerprint,
        "parameters": sum(t.numel() for t in weights.values()),
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in weights.values()}),
        "megabytes": round(_megabytes(path), 2),
        "tapped_layers": list(options.get("taps") or ([] if tap is None else [tap])),
        "draft_vocabulary": options.get("draft_vocab_size") or options.get("vocab_size"),
        "options": options,
    }


def _megabytes(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) / 1e6
