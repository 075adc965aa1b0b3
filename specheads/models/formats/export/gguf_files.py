"""GGUF files for llama.cpp, made by its own converter: the head's draft.gguf and its base's target.gguf."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers.utils import logging

from specheads.hub import hub_options, may_be_repository
from specheads.models.files import CheckpointError
from specheads.models.formats.export import gguf_converter

logger = logging.get_logger("specheads")

SCRIPT, TARGET, DRAFT = "convert_hf_to_gguf.py", "target.gguf", "draft.gguf"
_OUTTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_OF_A_BASE = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


def converter(path: Path | str) -> Path:
    """llama.cpp's converter: `path` itself, or the one in the checkout at `path`. CheckpointError if there is none."""
    script = Path(path) / SCRIPT if Path(path).is_dir() else Path(path)
    if script.name != SCRIPT or not script.is_file():
        raise CheckpointError(f"{path} is neither llama.cpp's {SCRIPT} nor a checkout of llama.cpp that holds it")
    return script.resolve()


def folder_of(base: str | None, revision: str | None = None) -> Path:
    """The folder with a base's files, downloaded from the hub if needed. CheckpointError if it is neither local nor on
    the hub."""
    if base is None or not (Path(base).is_dir() or may_be_repository(base)):
        raise CheckpointError(
            f"the base {base or 'in memory'} is no folder; for GGUF files save it, and give it as base="
        )
    if Path(base).is_dir():
        return Path(base).resolve()
    try:
        return Path(snapshot_download(base, revision=revision, allow_patterns=_OF_A_BASE, **hub_options(base)))
    except FileNotFoundError as error:
        raise CheckpointError(f"the base of a GGUF file: {error}") from error


def outtype(dtype: torch.dtype) -> str:
    """The converter's name for a dtype. CheckpointError if it has none."""
    if dtype not in _OUTTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _OUTTYPES)
        raise CheckpointError(f"GGUF files are written in {known}, not {dtype}; give one as dtype")
    return _OUTTYPES[dtype]


def write(script: Path, head: Path, base: Path, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Write target.gguf and draft.gguf into `head`, an export for llama.cpp.

    dtypes: of the base and of the head. CheckpointError with the converter's last line if it fails.
    """
    target, draft = map(outtype, dtypes)
    _run(script, base, "--outtype", target, "--outfile", head / TARGET)
    _run(script, head, "--target-model-dir", base, "--outtype", draft, "--outfile", head / DRAFT)


def _run(script: Path, model: Path, *options: Path | str) -> None:
    logger.info("%s converts %s", script.name, model)
    command = [sys.executable, gguf_converter.__file__, script, model, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        missing, more = re.search(r"No module named '(\w+)|(sentencepiece) library", lines[-1], re.IGNORECASE), ""
        if missing:
            install = shlex.join([sys.executable, "-m", "pip", "install", (missing[1] or missing[2]).lower()])
            more = f"; {sys.executable} needs what its requirements/ name: {install}"
        raise CheckpointError(f"{script} cannot convert {model}: {lines[-1].strip()}{more}")
