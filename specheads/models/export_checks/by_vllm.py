"""Loads an export with vLLM's own config, model class and loader, in a separate process, without the base's weights."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.models.export_checks.comparison import compare_rotary, compare_tensors, compare_values
from specheads.models.files import CheckpointError
from specheads.models.formats.export import gguf_files
from specheads.models.formats.files import Files
from specheads.models.formats.parts.layer_ids import boundaries

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

_SCRIPT = "specheads.models.export_checks.in_vllm"
_UNREAD = ("t2d", "token_map")  # token_map: vLLM ignores it if a Medusa head has a row per token, as exports do
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def check(folder: Path, model: SpecModel) -> str:
    base = gguf_files.folder_of(model.config.base_model_name_or_path, model.config.base_revision)
    head = model.head.config
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "held.pt"
        command = [sys.executable, "-m", _SCRIPT, folder, base, head.kind, head.served_depth, _dtype(folder), out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            raise CheckpointError(f"vLLM cannot load {folder}: {said[-1].strip()}")
        found = torch.load(out, weights_only=True)
    program = f"vLLM {found['version']}"
    count = compare_tensors(program, folder, _by_file(folder, found["tensors"]), _UNREAD)
    compared = [f"the values of all {count} tensors"]
    if found["layers"] is not None:
        compare_values(program, folder, found, {"layers": boundaries(model.head.layers, model.base)})
        compared.append(f"hidden states {found['layers']}")
    if found["cos"] is not None:
        compared.append(compare_rotary(program, head, found["positions"], found["cos"], found["sin"]))
    return f"{program} loads it as {found['class']}, with {', '.join(compared)}"


def _dtype(folder: Path) -> str:
    files = Files(folder)
    return next(str(t.dtype).removeprefix("torch.") for t in files.shapes.values() if t.is_floating_point())


def _by_file(folder: Path, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's tensors under the file's names: stacked ones are split, and padding rows of vocabularies dropped."""
    found, shapes = {}, Files(folder).shapes
    for name, shape in shapes.items():
        theirs, start = _location(name, shapes)
        own = next((t for n, t in held.items() if n == theirs or n.endswith(f".{theirs}")), None)
        if own is not None:
            found[name] = own[start : start + len(shape)]
    return found


def _location(name: str, shapes: dict[str, Tensor]) -> tuple[str, int]:
    """The suffix of vLLM's name for a tensor of the file, and the row of vLLM's tensor at which it starts."""
    if name == "d2t":
        return "draft_id_to_target_id", 0
    theirs = name.replace("midlayer.", "layers.0.")
    for whole, parts in _STACKED.items():
        for i, part in enumerate(parts):
            if part in theirs:
                return theirs.replace(part, whole), sum(len(shapes[name.replace(part, other)]) for other in parts[:i])
    return theirs, 0
