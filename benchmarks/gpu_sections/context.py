"""A step after a long context, beside the time in which its weights and its keys and values can be read.

Shapes: B batch rows, L tokens of the context.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_sections.machine import Machine
from gpu_sections.successor import prompts
from gpu_sections.timing import Deadline, Stepper, Times, peak_memory
from specheads.decoding.verify import causal
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.model_inputs import ModelInputs
from specheads.decoding.verify.verifier import TargetOutput

TITLE = "A step after a long context"
COLUMNS = (
    "context", "nodes", "read, MB: weights", "keys, values", "floor, ms", "step, ms (95 %)", "× floor",
    "compiled, ms (95 %)", "× floor", "keys copied, ms (95 %)", "peak, MB", "keys copied",
)  # fmt: skip
READ = 64  # tokens of the context that the base reads


class RandomPrefixTarget(Target):
    """The keys and values of a prompt are random numbers, which take as long to attend to: reading 32k tokens would
    take minutes on a CPU."""

    def _forward_prompts(self, ids: Tensor, lengths: Tensor, inputs: ModelInputs) -> TargetOutput:
        out = super()._forward_prompts(ids[:, -READ:], lengths.clamp(max=READ), inputs)
        self.cache.lengths = lengths
        self.cache.prepare(ids.shape[1])
        for stack in self.cache.stacks:
            stack.normal_()
        return out


def measure(machine: Machine, deadline: Deadline) -> dict[str, Any]:
    """keys copied: as transformers' sdpa attends, with keys and values repeated for the query heads that share them;
    it takes turns with our steps. Peak: of one step, beyond weights and cache."""
    rows, lines = [], []
    cells = [(length, nodes) for length in machine.sizes.lengths for nodes in machine.sizes.context_nodes]
    for length, nodes in cells:
        if deadline.over(f"{length} tokens, {nodes} nodes"):
            continue
        try:
            row = measure_cell(machine, length, nodes, deadline)
        except torch.OutOfMemoryError:
            deadline.skipped.append(f"{length} tokens, {nodes} nodes: out of memory")
            continue
        finally:
            gc.collect()
            if machine.device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append({name: value.to_dict() if isinstance(value, Times) else value for name, value in row.items()})
        lines.append(line_of(row))
        print("  " + " · ".join(lines[-1]), flush=True)
    return {"lines": lines, "rows": rows}


def measure_cell(machine: Machine, length: int, nodes: int, deadline: Deadline) -> dict[str, Any]:
    sizes, base = machine.sizes, machine.base
    steps = sizes.rounds * sizes.steps + 1
    ids = prompts(sizes, 1, length, machine.device)[0]["input_ids"]
    machine.drafter.right.fill_(0)
    target = RandomPrefixTarget(base, scratch=nodes)
    text = Stepper(target, machine.drafter, nodes, ids, 2 * steps)
    cache = target.cache
    states = sum(s[:, :, :, : cache.attended].numel() * s.element_size() for s in cache.stacks)
    times = {"step": Times(), "copied": Times()}
    peaks = {}
    ways = {"step": nullcontext, "copied": lambda: mock.patch.object(causal, "grouped_heads", ungrouped)}
    for name in ways:  # warms up, too
        with ways[name](), peak_memory(machine.device) as peak:
            text.step()
        peaks[name] = peak.bytes
    for _ in range(sizes.rounds):
        if times["step"].seconds and deadline.over(f"a round of {length} tokens, {nodes} nodes"):
            break
        for name in ways:
            with ways[name]():
                times[name].seconds += [text.step().seconds for _ in range(sizes.steps)]
    del text, target, cache
    gc.collect()
    compiled = None
    if (
        nodes == 8
        and length in sizes.context_compiled
        and not deadline.over(f"{length} tokens, {nodes} nodes, compiled")
    ):
        static = RandomPrefixTarget(base, scratch=nodes, static=True)
        whole = Stepper(static, machine.drafter, nodes, ids, steps, machine.compiled)
        compiled = Times([whole.step().seconds for _ in range(steps)])
    weights, bandwidth = machine.floor.weight_bytes, machine.floor.bandwidth
    return {
        "length": length, "nodes": nodes, "weight_bytes": weights, "state_bytes": states,
        "floor_seconds": (weights + states) / bandwidth, "step": times["step"], "compiled": compiled,
        "copied": times["copied"], "peak_bytes": peaks["step"], "peak_bytes_copied": peaks["copied"],
    }  # fmt: skip


def ungrouped(base: Any) -> Any:
    return nullcontext()


def line_of(row: dict[str, Any]) -> list[str]:
    floor, compiled = row["floor_seconds"], row["compiled"]
    return [
        f"{row['length']:,}", str(row["nodes"]),
        f"{row['weight_bytes'] / 1e6:,.1f}", f"{row['state_bytes'] / 1e6:,.1f}", f"{1e3 * floor:.2f}", str(row["step"]),
        f"{row['step'].median / floor:.2f}", str(compiled or "–"),
        f"{compiled.median / floor:.2f}" if compiled else "–", str(row["copied"]),
        f"{row['peak_bytes'] / 1e6:,.1f}", f"{row['peak_bytes_copied'] / 1e6:,.1f}",
    ]  # fmt: skip
