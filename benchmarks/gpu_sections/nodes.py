"""What a pass costs over 1 … 128 nodes: verification alone, and the whole step, eager and compiled."""

from __future__ import annotations

from typing import Any

from gpu_sections.machine import Machine
from gpu_sections.successor import prompts
from gpu_sections.timing import Deadline, Stepper, Times, peak_memory
from specheads.bench.tune.timing import TimedTarget
from specheads.decoding.verify.causal import Target

TITLE = "A pass over 1 … 128 nodes"
COLUMNS = (
    "nodes",
    "verify, ms (95 %)",
    "× floor",
    "step, ms (95 %)",
    "compiled step, ms (95 %)",
    "× floor",
    "peak, MB",
)


def measure(machine: Machine, deadline: Deadline) -> dict[str, Any]:
    """Steps of different widths take turns. Peak: of one step, beyond weights and cache."""
    sizes, base = machine.sizes, machine.base
    steps = sizes.rounds * sizes.steps + 1
    ids = prompts(sizes, 1, sizes.prompt, machine.device)[0]["input_ids"]
    machine.drafter.right.fill_(0)
    targets = {nodes: TimedTarget(base, scratch=nodes) for nodes in sizes.nodes}
    verify, step, compiled = ({nodes: Times() for nodes in sizes.nodes} for _ in range(3))
    texts: dict[int, Stepper] = {}
    for nodes in sizes.nodes:
        if not deadline.over(f"{nodes} nodes"):
            texts[nodes] = Stepper(targets[nodes], machine.drafter, nodes, ids, steps)
    for _ in range(sizes.rounds):
        for nodes, text in texts.items():
            for _ in range(sizes.steps):
                step[nodes].seconds.append(text.step().seconds)
                verify[nodes].seconds.append(targets[nodes].seconds)
    peaks = {}
    for nodes, text in texts.items():
        with peak_memory(machine.device) as peak:
            text.step()
        peaks[nodes] = peak.bytes
    for nodes in sizes.compiled:
        if nodes not in texts or deadline.over(f"{nodes} nodes, compiled"):
            continue
        target = Target(base, scratch=nodes, static=True)
        text = Stepper(target, machine.drafter, nodes, ids, steps, machine.compiled)
        compiled[nodes].seconds += [text.step().seconds for _ in range(steps)]
    floor = machine.floor.seconds
    rows, lines = [], []
    for nodes in texts:
        whole = compiled[nodes] if compiled[nodes].seconds else None
        rows.append({
            "nodes": nodes, "verify": verify[nodes].to_dict(), "step": step[nodes].to_dict(),
            "compiled_step": whole and whole.to_dict(), "peak_bytes": peaks[nodes],
        })  # fmt: skip
        lines.append([
            str(nodes), str(verify[nodes]), f"{verify[nodes].median / floor:.2f}", str(step[nodes]),
            str(whole or "–"), f"{whole.median / floor:.2f}" if whole else "–", f"{peaks[nodes] / 1e6:.1f}",
        ])  # fmt: skip
    return {"lines": lines, "rows": rows, "compile_failure": machine.compiled.failure}
