"""vLLM's own config, model class and loader on an export; without the base's weights, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.formats import gguf_files
from specheads.formats.checks.held import compare, compare_rotary, compare_values
from specheads.formats.files import Files
from specheads.saved_head import CheckpointError

if TYPE_CHECKING:
    from specheads.spec_model import SpecModel

_SCRIPT = "specheads.formats.checks.in_vllm"
_UNREAD = ("t2d", "token_map")  # the latter where a Medusa head has a row for every token, as exports have
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def check(folder: Path, model: SpecModel) -> str:
    base = gguf_files.folder_of(model.config.base_model_name_or_path, model.config.base_revision)
    head: Any = model.head.config
    depth = getattr(head, "num_heads", getattr(head, "draft_depth", 1))
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "held.pt"
        command = [sys.executable, "-m", _SCRIPT, folder, base, head.kind, depth, _dtype(folder), out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            raise CheckpointError(f"vLLM cannot load {folder}: {said[-1].strip()}")
        found = torch.load(out, weights_only=True)
    program = f"vLLM {found['version']}"
    count = compare(program, folder, _by_file(folder, found["tensors"]), _UNREAD)
    compared = [f"the values of all {count} tensors"]
    if found["layers"] is not None:
        compare_values(program, folder, found, {"layers": list(model.head.layers)})
        compared.append(f"hidden states {found['layers']}")
    if found["cos"] is not None:
        compared.append(compare_rotary(program, head, found["positions"], found["cos"], found["sin"]))
    return f"{program} loads it as {found['class']}, with {', '.join(compared)}"


def _dtype(folder: Path) -> str:
    files = Files(folder)
    return next(str(t.dtype).removeprefix("torch.") for t in files.shapes.values() if t.is_floating_point())


def _by_file(folder: Path, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's tensors under the file's names: what it stacks apart again, and no rows that pad a vocabulary."""
    found = {}
    for name, shape in Files(folder).shapes.items():
        theirs = "draft_id_to_target_id" if name == "d2t" else name.replace("midlayer.", "layers.0.")
        stack = next(((whole, parts) for whole, parts in _STACKED.items() for part in parts if part in theirs), None)
        start = 0
        if stack is not None:
            whole, parts = stack
            part = next(part for part in parts if part in theirs)
            before = [name.replace(part, other) for other in parts[: parts.index(part)]]
            start, theirs = sum(len(Files(folder).shapes[n]) for n in before), theirs.replace(part, whole)
        own = next((t for n, t in held.items() if n == theirs or n.endswith(f".{theirs}")), None)
        if own is not None:
            found[name] = own[start : start + len(shape)]
    return found
