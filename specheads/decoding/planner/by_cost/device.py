"""The name of the device that costs were measured on."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or `AMD EPYC 9V74, 2 threads`: threads change what a step costs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


@cache
def cpu_name() -> str:
    try:
        for entry in Path("/proc/cpuinfo").read_text("utf8").splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
