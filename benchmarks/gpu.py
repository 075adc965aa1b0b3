"""Checks correctness and speed on an accelerator, with random weights, in one command of ten minutes.

    python benchmarks/gpu.py --out docs/benchmarks
    python benchmarks/gpu.py --head org/head --base org/model --prompts questions.jsonl --out runs/gpu
    python benchmarks/gpu.py --toy --out runs/gpu      # all of it in tiny sizes, on a CPU

1. Correctness: greedy texts in float32 equal transformers' generate(), sampled ones pass a G-test, both also compiled.
2. A pass over 1 … 128 nodes: verification and the whole step, eager and compiled, over the time to read the weights.
3. Whole texts with 1, 2, 3 and 4 tokens per step, beside transformers' generate(), eager, and static and compiled.
4. A step after 400, 8,000 and 32,000 tokens, beside the time to read its keys and values.
5. Attention of one layer, torch's and split over the keys, beside that time.

With --head, first of all: whole texts of that head and its base, eager and compiled, beside transformers' generate().

The base of 1 to 5 is an 8B-shaped Llama in bfloat16 if it takes at most half of the memory (--size chooses another).
gpu.json and gpu.md are written after each section, so a run that is cut off keeps its results; it does not resume. Each
section has a part of --seconds, starts nothing after that, and lists what it skipped. Exit code 1 if a text is wrong, a
section failed, or the library warned, for example of a step that could not be compiled.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_sections import attention, context, correctness, nodes, speed, trained
from gpu_sections.machine import Machine
from gpu_sections.sizes import SIZES, largest
from gpu_sections.timing import Deadline
from transformers.utils import logging as hf_logging

from specheads.bench import environment, report

# Name → the function that measures it, its title, its columns, its part of --seconds.
SECTIONS: dict[str, tuple[Callable[[Machine, Deadline], dict[str, Any]], str, Sequence[str], float]] = {
    "correctness": (
        lambda machine, deadline: correctness.measure(machine.sizes, machine.device, deadline),
        correctness.TITLE, correctness.COLUMNS, 0.2,
    ),
    "nodes": (nodes.measure, nodes.TITLE, nodes.COLUMNS, 0.2),
    "speed": (speed.measure, speed.TITLE, (), 0.3),
    "context": (context.measure, context.TITLE, context.COLUMNS, 0.25),
    "attention": (attention.measure, attention.TITLE, attention.COLUMNS, 0.05),
}  # fmt: skip
LEGEND = (
    "floor: the bytes of the weights, after long contexts also of the keys and values, over the bandwidth at which a "
    "matrix as large (4 GiB at most) is read; of attention by itself, those of the keys and values alone.",
    "ms (95 %): median of a step's milliseconds, and its interval by resampling the steps.",
    "a step: draft, verification, acceptance, commit, and the tokens on the host. n a step: chains of 8 nodes of which "
    "n − 1 drafted tokens are right.",
    "peak: bytes alive at once beyond what was there before. keys copied: with keys and values repeated for the query "
    "heads that share them, as transformers' sdpa does under a mask.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for gpu.md and gpu.json")
    parser.add_argument("--head", help="a trained head's folder or hub id, timed with its base")
    parser.add_argument("--base", help="the model of --head, where its own config does not find it")
    parser.add_argument("--prompts", type=Path, help="questions for --head (.jsonl); default: held-out Python files")
    parser.add_argument("--size", choices=list(SIZES), help="of the random base; default: the largest that fits")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU: --size toy --device cpu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=600, help="time for all sections; 600 by default")
    parser.add_argument("--only", nargs="+", choices=["trained", *SECTIONS], help="only these sections")
    options = parser.parse_args(arguments)
    if options.head is None and (options.base or options.prompts or "trained" in (options.only or ())):
        parser.error("--base, --prompts and the section trained go with --head")

    hf_logging.disable_progress_bar()
    device = torch.device("cpu" if options.toy else options.device)
    sizes = SIZES["toy" if options.toy else options.size] if options.toy or options.size else largest(device)
    machine = Machine(sizes, device)
    warnings = Warnings()
    logging.getLogger("specheads").addHandler(warnings)
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    record: dict[str, Any] = {
        "command": f"python benchmarks/gpu.py {given}", "environment": environment.environment(),
        "device": str(device), "base": machine.to_dict(), "sections": {},
    }  # fmt: skip
    sections = dict(SECTIONS)
    if options.head is not None:
        sections = {"trained": (partial(measure_trained, options), trained.TITLE, (), 0.3), **sections}
    chosen = options.only or list(sections)
    parts = sum(sections[name][-1] for name in chosen)
    for name in chosen:
        measure, title, columns, part = sections[name]
        print(f"{title} …", flush=True)
        deadline, began = Deadline(part / parts * options.seconds), time.perf_counter()
        try:
            found = measure(machine, deadline)
        except Exception as error:  # the other sections may still give results
            traceback.print_exc()
            found = {"lines": [], "error": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - began
        record["sections"][name] = {
            "title": title, "columns": list(columns), **found, "skipped": deadline.skipped, "seconds": seconds,
        }  # fmt: skip
        record["warnings"] = warnings.messages
        report.write(options.out, "gpu", as_markdown(record), record)
    logging.getLogger("specheads").removeHandler(warnings)
    print(as_markdown(record))
    done = record["sections"].values()
    return int(bool(warnings.messages) or any("error" in one or not one.get("right", True) for one in done))


def measure_trained(options: argparse.Namespace, machine: Machine, deadline: Deadline) -> dict[str, Any]:
    return trained.measure(options.head, options.base, options.prompts, machine.device, deadline)


class Warnings(logging.Handler):
    """Collects the library's warnings, such as of a step that could not be compiled, but not that it is compiling, or
    whose costs `draft="auto"` begins with."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.startswith(("compiling ", "compiled ", "draft='auto' uses ")) and message not in self.messages:
            self.messages.append(message)


def as_markdown(record: dict[str, Any]) -> str:
    base, floor = record["base"], record["base"]["floor"]
    text = [
        "# On an accelerator\n", f"`{record['command']}`\n",
        f"{environment.line(record['environment'])}; on {record['device']}.\n",
        f"A random Llama, {base['name']}: {base['shape']}, {base['dtype'].removeprefix('torch.')}. Floor of a pass: "
        f"{1e3 * floor['seconds']:.2f} ms ({floor['weight_bytes'] / 1e6:,.1f} MB of weights read at "
        f"{floor['bandwidth'] / 1e9:,.1f} GB/s).\n",
        *(f"- {line}" for line in LEGEND), "",
    ]  # fmt: skip
    for section in record["sections"].values():
        text += [f"## {section['title']}\n"]
        if section["lines"]:
            text += [report.markdown(tuple(section["columns"]), section["lines"])]
        if "error" in section:
            text += [f"**Failed:** {section['error']}\n"]
        if section["skipped"]:
            text += [f"Skipped when its time was over: {'; '.join(section['skipped'])}.\n"]
    text += [f"**Warning:** {message}\n" for message in record["warnings"]]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
