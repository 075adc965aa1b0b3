"""The hardware and versions with which a figure was measured."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import transformers

from specheads.decoding.planner.by_cost.cost_file import cpu_name
from specheads.version import __version__


def environment() -> dict[str, Any]:
    """Hardware and versions, without the machine's name or any path on it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "cores": usable,
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "specheads": __version__,
    }


def count_noun(number: int, noun: str) -> str:
    """A number with its noun, such as `1 core` or `2 cores`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def line(record: dict[str, Any]) -> str:
    """One line such as `2 cores of AMD EPYC, 2 threads, load 0.4; Linux x86_64, Python 3.11.9, torch 2.13.0, …`."""
    where = f"{count_noun(record['cores'], 'core')} of {record['cpu']}, {count_noun(record['torch_threads'], 'thread')}"
    if record["load_average"] is not None:
        where += f", load {record['load_average']}"
    where += "".join(f", {gpu}" for gpu in record["gpus"])
    versions = ", ".join(f"{name} {record[name]}" for name in ("torch", "transformers", "specheads"))
    return f"{where}; {record['system']}, Python {record['python']}, {versions}"
