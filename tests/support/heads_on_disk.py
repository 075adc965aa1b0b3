"""Heads of a small base as files: made, compared, changed on disk, and restored in a new process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specheads import SpecModel, convert

IDS = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
FILES = {"model.safetensors", "config.json"}


def trained(base, head, seed=5, **options) -> SpecModel:
    """A head with random weights everywhere, so that nothing agrees by being at its start; EAGLE-3 as published."""
    if head == "eagle3":
        options = {"norm_before_residual": False, **options}
    model = convert(base, head, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if head in ("eagle3", "parallel"):
        counts = torch.rand(model.head.config.vocab_size, generator=generator)
        model.head.set_draft_vocabulary(counts, model.base if head == "parallel" else None)
    return model.eval()


def digest(model) -> str:
    parts = (f"{n} {t.dtype} {tuple(t.shape)} {t.double().numpy().tobytes()!r}" for n, t in state(model).items())
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def state(model):
    return model.head_state_dict()


def same(model, other):
    ours, theirs = state(model), state(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(t, theirs[name]) and t.dtype == theirs[name].dtype for name, t in ours.items()
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def edit_config(folder, **changes):
    """Change the config in both of its places; None takes an entry away."""
    path = Path(folder) / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    config = {**json.loads(metadata["specheads_config"]), **changes}
    text = json.dumps({name: value for name, value in config.items() if value is not None})
    save_file(load_file(path), path, {**metadata, "specheads_config": text})
    (Path(folder) / "config.json").write_text(text, "utf8")


def in_new_process(script, *arguments):
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@contextmanager
def kept_files(folder: Path):
    """Whatever the block does to the files of a folder is undone."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield
    for path in folder.iterdir():
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)
