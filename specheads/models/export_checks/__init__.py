"""`--check`: loads an export with the code of the program it was written for, if that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.models.export_checks import by_gguf, by_modelopt, by_speculators, by_transformers, by_vllm

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

Check = Callable[[Path, "SpecModel"], str]

# Engine → the module that shows whether its program is installed, and the function that checks an export with it.
_CHECKS: dict[str, tuple[str, Check | None]] = {
    "vllm": ("vllm", by_vllm.check), "sglang": ("sglang", None), "trtllm": ("tensorrt_llm", None),
    "speculators": ("speculators", by_speculators.check), "eagle": ("eagle", None), "medusa": ("medusa", None),
    "hydra": ("hydra", None), "modelopt": ("modelopt", by_modelopt.check), "llamacpp": ("gguf", by_gguf.check),
    "dflash": ("dflash", None), "jetspec": ("jetspec", None), "deepspec": ("deepspec", None),
    "openvino": ("openvino_genai", None), "mtp": ("vllm", None),
}  # fmt: skip


def check(folder: Path, engine: str, model: SpecModel) -> str:
    """Check an export → one line on what was loaded, by which version, and what was compared with the head.

    CheckpointError if the program's own code fails, or reads values that differ from what was written.
    """
    module, run = _CHECKS.get(engine, (None, None))
    if module is None:
        found = f"not checked: nothing here reads an export for {engine}"
    elif importlib.util.find_spec(module) is None:
        found = f"not checked: {module} is not installed here"
    elif run is None:
        found = f"not checked: {module} reads heads in a running server alone; its README has the command"
    else:
        found = run(folder, model)
    return "; ".join(line for line in (found, by_transformers.check(folder, model)) if line)
