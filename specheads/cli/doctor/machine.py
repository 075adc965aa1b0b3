"""The machine: versions, devices, shipped checkpoints, and what will be fast or slow."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
import urllib.error
import urllib.request
from typing import Any

import psutil  # a dependency of accelerate
import torch
from huggingface_hub import constants

from specheads.bench.environment import count_noun, environment
from specheads.data import corpus
from specheads.decoding.probs.precision import bfloat16_is_fast
from specheads.heads import HEADS
from specheads.models.base.loading import LARGE, placement

_SECONDS = 5.0  # timeout for the hub


def machine_record(network: bool = False) -> dict[str, Any]:
    """environment(), the known heads, the shipped checkpoints with their sizes, and a line for everything that affects
    speed. network: also check whether the hub can be reached."""
    here = environment()
    record = {
        **here, "heads": list(HEADS), "shipped_checkpoints": _shipped(), "memory": _memory(),
        "dtype_auto": _default_dtype(), "compiler": _compiler(), "bfloat16": _bfloat16(), "attention": _attention(),
        "threads": _threads(here),
    }  # fmt: skip
    return record | {"hub": _hub(constants.ENDPOINT)} if network else record


def _shipped() -> dict[str, str] | str:
    try:
        folder = corpus.checkpoints_dir()
    except FileNotFoundError:
        return "none: they come with the repository; `specheads demo` trains a base and a head"
    sizes = {p.name: sum(f.stat().st_size for f in p.iterdir() if f.is_file()) for p in sorted(folder.iterdir())
             if (p / "config.json").is_file()}  # fmt: skip
    return {name: f"{size / 1e6:.1f} MB" for name, size in sizes.items()}


def _memory() -> str:
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    sizes = [f"{psutil.virtual_memory().total / 1e9:.0f} GB", *(f"{size / 1e9:.0f} GB on GPU {i}" for i, size in
                                                               enumerate(gpus))]  # fmt: skip
    _, device = placement("auto", "auto")
    dtype = torch.bfloat16 if device.type != "cpu" or bfloat16_is_fast(device) else torch.float32
    return (
        f"{', '.join(sizes)}; a base of 8B parameters takes {8 * dtype.itemsize} GB in {_name(dtype)}, and its "
        "training more (--dry-run)"
    )


def _default_dtype() -> str:
    """What --dtype auto loads here."""
    _, device = placement("auto", "auto")
    if device.type != "cpu":
        return "the checkpoint's"
    if bfloat16_is_fast(device):
        return f"the checkpoint's bfloat16 for a base of at least {LARGE / 1e6:.0f}M weights, else float32"
    return "float32, since there is no GPU; --dtype bfloat16 takes half the memory, and is slow here"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiler() -> str:
    """The compiler that torch.compile would use."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if compiler is None:
        return f"none of {', '.join(names)}, so torch.compile fails: install g++, or name one in CXX"
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return f"{compiler}, but no triton, so torch.compile fails on the GPU: pip install triton"
    return f"{compiler}, which torch.compile uses"


def _bfloat16() -> str:
    device, kind = ("GPU", "cuda") if torch.cuda.is_available() else ("processor", "cpu")
    if bfloat16_is_fast(torch.device(kind)):
        return f"fast on this {device}"
    other = "float16" if kind == "cuda" else "float32"
    return (
        f"slow on this {device}, which has no instructions for it: load models with dtype=torch.{other}, and train "
        "with training.bf16=false"
    )


def _attention() -> str:
    kernels = "sdpa or eager"
    if importlib.util.find_spec("flash_attn") is not None:
        return f"{kernels}; flash_attn is installed, but its kernels take no tree masks"
    return f"{kernels}; sdpa, the default, is faster"


def _threads(here: dict[str, Any]) -> str:
    threads, cores, load = here["torch_threads"], here["cores"], here["load_average"]
    line = f"{threads} on {count_noun(cores, 'core')}"
    if threads > cores:
        line += f": more than there are cores, which is slow; set OMP_NUM_THREADS={cores}"
    elif load is not None and load > cores:
        line += f"; other programs use the machine (load {load}), so times will be longer"
    return line


def _hub(endpoint: str) -> str:
    """A line on whether the hub answers. It never raises, since models on disk do not need the hub."""
    if constants.HF_HUB_OFFLINE:
        return f"{endpoint} not asked: HF_HUB_OFFLINE is set"
    began = time.monotonic()
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return f"{endpoint} answers in {time.monotonic() - began:.1f} s"
    except urllib.error.HTTPError as error:
        return f"{endpoint} answers with status {error.code}"
    except (OSError, ValueError) as error:
        return f"{endpoint} cannot be reached ({error}): use models on disk, or a mirror named in HF_ENDPOINT"
