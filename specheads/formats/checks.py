"""`--check`: an export loaded by the code of the program it is for, where that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specheads.formats.files import Files
from specheads.saved_head import CheckpointError

if TYPE_CHECKING:
    from specheads.spec_model import SpecModel

# The module whose presence says that a program is here.
_MODULES = {
    "vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", "speculators": "speculators", "eagle": "eagle",
    "medusa": "medusa", "hydra": "hydra", "modelopt": "modelopt", "llamacpp": "gguf",
    "dflash": "dflash", "jetspec": "jetspec", "deepspec": "deepspec",
}  # fmt: skip


def check(folder: Path, engine: str, model: SpecModel) -> str:
    """One line on what was found. CheckpointError where the program's own code reads other values than were written."""
    module = _MODULES[engine]
    if importlib.util.find_spec(module) is None:
        return f"not checked: {module} is not installed here"
    if engine not in _CHECKS:
        return f"not checked: {module} reads heads in a running server alone; its README has the command"
    return _CHECKS[engine](folder, model)


def _speculators(folder: Path, model: SpecModel) -> str:
    """Its from_pretrained, and every tensor it then holds against the file."""
    from speculators import SpeculatorModel

    loaded = SpeculatorModel.from_pretrained(str(folder), attn_implementation="eager")
    state: dict[str, Any] = loaded.state_dict()
    files = Files(folder)
    wrong = [
        name for name in files.shapes
        if name not in state or not torch.equal(state[name].float().cpu(), files.tensor(name).float())
    ]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"speculators {version('speculators')} did not read {', '.join(sorted(wrong))} of {folder}"
        )
    return f"speculators {version('speculators')} loads it, with the values of all {len(files.shapes)} tensors"


_CHECKS: dict[str, Callable[[Path, SpecModel], str]] = {"speculators": _speculators}
