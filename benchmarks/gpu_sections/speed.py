"""Whole texts: steps that accept a given number of tokens, against the floor and against transformers' generate()."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu_sections.machine import Machine
from gpu_sections.successor import prompts
from gpu_sections.timing import Deadline, peak_memory
from specheads.bench import decoders
from specheads.bench.compare.report import rows_of, tables
from specheads.bench.figures.samples import rounds_of
from specheads.bench.runner import Decoder, race
from specheads.decoding.planner import chain

TITLE = "Whole texts, one row, greedy"
REFERENCE = "transformers"
DEPTH = 7  # of the chains: 8 nodes a step
ACCEPTED = (1, 2, 3, 4)  # tokens a step that are forced; without compiling the last alone, for all steps take as long


def measure(machine: Machine, deadline: Deadline) -> dict[str, Any]:
    sizes = machine.sizes
    batches = prompts(sizes, sizes.prompts, sizes.prompt, machine.device)
    return measure_in_turn(
        all_decoders(machine), batches, deadline, machine.device, repeats=sizes.repeats,
        floor_seconds=machine.floor.seconds, prompts="random",
    )  # fmt: skip


def measure_in_turn(
    decoders: dict[str, Decoder], batches: list[dict[str, Any]], deadline: Deadline, device: torch.device, *,
    repeats: int, floor_seconds: float, prompts: str,
) -> dict[str, Any]:  # fmt: skip
    """Decoders take turns at each prompt. Those that are not warm when a third of the time is left are skipped.

    decoders: by name, the reference among them. floor_seconds: of a pass of the base. prompts: where they come from."""
    warm: dict[str, Decoder] = {}
    peaks: dict[str, int] = {}
    warming = Deadline(deadline.seconds * 2 / 3, deadline.began, deadline.skipped)
    for name, decoder in decoders.items():
        if name == REFERENCE or not warming.over(name):
            decoder(batches[0], None)
            with peak_memory(device) as peak:
                decoder(batches[0], None)
            peaks[name] = peak.bytes
            warm[name] = decoder
            print(f"  warm: {name}", flush=True)
    left = max(1.0, deadline.seconds / 3)
    result = race(warm, batches, repeats=repeats, budget=left)
    done = sum(map(len, result.runs[REFERENCE]))
    if done < repeats * len(batches):
        deadline.skipped.append(f"{repeats * len(batches) - done} of {repeats * len(batches)} rounds")
    cell = {"prompts": prompts, "batch": 1, "temperature": 0.0}
    rounds = [{**cell, **one} for one in rounds_of(result, REFERENCE)]
    rows = rows_of(rounds, REFERENCE, floor_seconds)
    (table, *_) = tables(rows)
    return {
        "columns": [*table.columns, "peak, MB"],
        "lines": [[*line, f"{peaks[line[0]] / 1e6:.1f}"] for line in table.lines],
        "rows": rows, "peak_bytes": peaks,
    }  # fmt: skip


def all_decoders(machine: Machine) -> dict[str, Decoder]:
    """By name, those first without which the others say little."""
    base, sizes = machine.base, machine.sizes
    ours = partial(decoders.specheads_generate, base, sizes.new)
    compile = {"compile": sizes.backend}

    def forced(accepted: int, **options: Any) -> Decoder:
        run = ours(draft=machine.drafter, plan=chain(DEPTH), **options)

        def with_drafts(batch: Any, watch: Any) -> Any:
            machine.drafter.right.fill_(accepted - 1)
            return run(batch, watch)

        return with_drafts

    static = decoders.transformers_static(base, sizes.new, sizes.prompt, backend=sizes.backend)
    return {
        REFERENCE: decoders.transformers_generate(base, sizes.new),
        "plain": ours(draft=False),
        f"{ACCEPTED[-1]} a step": forced(ACCEPTED[-1]),
        "plain, compiled": ours(draft=False, **compile),
        **{f"{n} a step, compiled": forced(n, **compile) for n in ACCEPTED},
        "transformers, static and compiled": static,
    }
