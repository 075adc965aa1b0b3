"""Attention of one layer by itself: torch's, and split over the keys, beside the time in which these can be read.

Shapes: B batch rows, N tree nodes, L attended slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_sections.machine import Machine
from gpu_sections.sizes import Sizes
from gpu_sections.timing import Deadline, Times
from specheads.decoding.verify import grouped_attention as attention

TITLE = "Attention of one layer"
COLUMNS = (
    "texts", "nodes", "slots", "floor, µs", "torch's, µs (95 %)", "× floor", "split, µs (95 %)", "× floor",
    "error: torch's", "split",
)  # fmt: skip
LAYERS = 4  # of different numbers: those of one would stay in the device's cache


def measure(machine: Machine, deadline: Deadline) -> dict[str, Any]:
    """error: ‖out − float64‖ / ‖float64‖ of the first layer."""
    sizes, rows, lines = machine.sizes, [], []
    for cell in sizes.attention:
        name = "{} texts, {} nodes, {} slots".format(*cell)
        if deadline.over(name):
            continue
        rows.append(measure_cell(machine, *cell))
        lines.append(line_of(rows[-1]))
        print("  " + " · ".join(lines[-1]), flush=True)
    return {"lines": lines, "rows": rows}


def measure_cell(machine: Machine, texts: int, nodes: int, slots: int) -> dict[str, Any]:
    sizes, device = machine.sizes, machine.device
    layers = [random_layer(sizes, device, texts, nodes, slots) for _ in range(LAYERS)]
    query, key, value, mask = layers[0]
    copies = (states.double().repeat_interleave(sizes.heads // sizes.key_heads, 1) for states in (key, value))
    exact = F.scaled_dot_product_attention(query.double(), *copies, attn_mask=mask.double())
    ways: dict[str, AbstractContextManager[Any]] = {"torch": mock.patch.object(attention, "HAS_TRITON", False)}
    with everywhere():
        if attention.can_split(query, key, value, mask):
            ways["split"] = everywhere()
    runs, errors = {}, {}
    for name, way in ways.items():
        with torch.no_grad(), way:
            out = attention.grouped_attention(*layers[0])
            runs[name] = repeatable(lambda: [attention.grouped_attention(*layer) for layer in layers], device)
        errors[name] = float((out.double() - exact).norm() / exact.norm())
    times = {name: Times() for name in runs}
    for _ in range(sizes.rounds * sizes.steps):
        for name, run in runs.items():
            times[name].seconds.append(seconds_of(run, device) / LAYERS)
    read = (key.numel() + value.numel()) * key.element_size()
    return {
        "texts": texts, "nodes": nodes, "slots": slots, "floor_seconds": read / machine.floor.bandwidth,
        "times": {name: found.to_dict() for name, found in times.items()}, "errors": errors,
    }  # fmt: skip


def everywhere() -> AbstractContextManager[Any]:
    """Split however few the keys are."""
    return mock.patch.object(attention, "MIN_KEYS", {True: 0, False: 0})


def random_layer(
    sizes: Sizes, device: torch.device, texts: int, nodes: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values, and a mask under which nine slots of ten are seen."""
    kind = {"device": device, "dtype": sizes.dtype}
    query = torch.randn(texts, nodes, sizes.heads, sizes.head_dim, **kind).transpose(1, 2)
    key, value = torch.randn(2, texts, sizes.key_heads, slots, sizes.head_dim, **kind)
    unseen = torch.rand(texts, 1, nodes, slots, device=device) > 0.9
    return query, key, value, torch.zeros(unseen.shape, **kind).masked_fill(unseen, torch.finfo(sizes.dtype).min)


def repeatable(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """On CUDA as a graph, so that the host's part does not count; after a call that makes the kernels."""
    run()
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def line_of(row: dict[str, Any]) -> list[str]:
    floor, cells = row["floor_seconds"], []
    for name in ("torch", "split"):
        if name not in row["times"]:
            cells += ["–", "–"]
            continue
        found = row["times"][name]
        bounds = "–".join(f"{1e3 * bound:.0f}" for bound in found["interval_ms"] or ())
        cells += [f"{1e3 * found['ms']:.0f}" + (f" ({bounds})" if bounds else ""), f"{found['ms'] / 1e3 / floor:.1f}"]
    errors = [f"{row['errors'][name]:.1e}" if name in row["errors"] else "–" for name in ("torch", "split")]
    return [str(row["texts"]), str(row["nodes"]), f"{row['slots']:,}", f"{1e6 * floor:.0f}", *cells, *errors]
