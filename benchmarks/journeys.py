"""How far one step travels through this package: files, functions, calls and changes of file of five journeys.

    python benchmarks/journeys.py                                # the table, beside the targets
    python benchmarks/journeys.py --journeys step --list         # and each function, in the order of its first call

Counted are Python functions of this package, comprehensions included, a function by its file and name. What PyTorch and
transformers do is left out, and so is what is done once before the first step. A change of file is a call into another
file than the call before. On the shipped base and EAGLE-3 head, greedy, uncompiled, one row; of a text's steps the one
with the median number of calls. A count depends on the code alone, not on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

import specheads
from specheads.bench import shipped
from specheads.bench.prompts import held_out_prompts
from specheads.decoding.loop import part_timer

ROOT = Path(specheads.__file__).resolve().parents[1]
PACKAGES = [ROOT / "specheads"]
WHEEL = [*PACKAGES, ROOT / "train"]
TEXT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48}  # whose steps are counted

# By row of the table: (title, counts before the second half of the house was built, the most they may be).
TARGETS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "lines": ("lines in the wheel's packages, in tests", (43800, 44100), (35500, 38000)),
    "step": ("a drafted step (head, chain of 4)", (28, 114, 281), (18, 75, 180)),
    "auto": ("an automatic step", (38, 200, 1582), (24, 120, 500)),
    "train": ("a training step", (25, 117, 512), (17, 75, 330)),
    "load": ("`load_head`", (28, 112, 1500), (17, 70, 500)),
    "readme": ("words in README", (2623,), (1000,)),
    "commands": ("parameters of all commands", (196,), (150,)),
}


@dataclass
class Journey:
    """calls: the code objects in the order in which they were called."""

    calls: list[CodeType] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return [str(Path(code.co_filename).relative_to(ROOT)) for code in self.calls]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Files, functions, calls, switches."""
        files = self.files
        switches = sum(a != b for a, b in pairwise(files))
        functions = {(file, code.co_name) for file, code in zip(files, self.calls, strict=True)}
        return len({*files}), len(functions), len(files), switches


@contextmanager
def counting() -> Iterator[Journey]:
    """Notes the calls in the block of functions in this package, of this thread."""
    journey, roots = Journey(), tuple(f"{package}/" for package in PACKAGES)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(roots):
            journey.calls.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield journey
    finally:
        sys.setprofile(before)


def steps_of(generate: Callable[[], object]) -> list[Journey]:
    """Each step of a call of generate(), without the first one after the prefill, which prepares those after it, and
    without the last one, with which the call returns."""
    starts: list[int] = []
    with counting() as whole:
        # The first part of each step ends once its row lengths are known, so a "step" here begins and ends there.
        token = part_timer.set(lambda part: starts.append(len(whole.calls)) if part == "other" else None)
        try:
            generate()
        finally:
            part_timer.reset(token)
    pairs = pairwise(starts[1:])
    return [Journey(whole.calls[start:end]) for start, end in pairs]


def usual(steps: list[Journey]) -> Journey:
    """The step with the median number of calls."""
    return sorted(steps, key=lambda step: len(step.calls))[len(steps) // 2]


def step(model: specheads.SpecModel, inputs: dict[str, Any]) -> Journey:
    return usual(steps_of(lambda: model.generate(**inputs, **TEXT, draft="head", tree="chain:4")))


def auto(model: specheads.SpecModel, inputs: dict[str, Any]) -> Journey:
    """Of a model's first text, in which plans are compared for the first time."""
    return usual(steps_of(lambda: model.generate(**inputs, **TEXT)))


def train(model: specheads.SpecModel, inputs: dict[str, Any]) -> Journey:
    """The second training step of a fresh head."""
    rows = [{"input_ids": inputs["input_ids"][0], "labels": inputs["input_ids"][0]}] * 2
    fresh = specheads.convert(model.base, "eagle3", steps=3, tree="chain:4")
    with tempfile.TemporaryDirectory() as folder:
        arguments = specheads.SpecTrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=1, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        trainer = specheads.SpecTrainer(fresh, arguments, train_dataset=rows)
        counted: list[Journey] = []
        one_step: Any = trainer.training_step

        def training_step(*given: Any, **options: Any) -> Any:
            with counting() as journey:
                loss = one_step(*given, **options)
            counted.append(journey)
            return loss

        trainer.training_step = training_step  # type: ignore[method-assign]
        trainer.train()
    return counted[-1]


def load(base: PreTrainedModel, folder: Path) -> Journey:
    with counting() as journey:
        specheads.load_head(base, folder)
    return journey


def count_lines(folders: list[Path]) -> int:
    return sum(len(path.read_text("utf8").splitlines()) for folder in folders for path in folder.rglob("*.py"))


def count_parameters() -> int:
    """Options and arguments of all commands, without --help."""
    import typer

    from specheads.cli.program import app

    pending, total = [typer.main.get_command(app)], 0
    while pending:
        command: Any = pending.pop()
        total += sum(option.name not in ("help", "version", "debug") for option in command.params)
        pending += list(getattr(command, "commands", {}).values())
    return total


def measure(names: list[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, Journey]]:
    """The figures of these rows, and the journeys among them."""
    hf_logging.disable_progress_bar()
    folder = shipped.find_base(None)
    journeys: dict[str, Journey] = {}
    if {"step", "auto", "train", "load"} & {*names}:
        base, tokenizer = shipped.load_base(folder, "cpu")
        head = folder.parent / "eagle3"
        journeys["load"] = load(base, head)
        model = specheads.SpecModel.from_pretrained(str(head), dtype="float32")
        inputs = tokenizer(held_out_prompts(tokenizer, 1, 64, shipped.held_out_names(folder))[0], return_tensors="pt")
        for name, run in (("step", step), ("auto", auto), ("train", train)):
            if name in names:
                journeys[name] = run(model, inputs)
    figures: dict[str, tuple[int, ...]] = {name: journey.counts for name, journey in journeys.items()}
    if "lines" in names:
        figures["lines"] = (count_lines(WHEEL), count_lines([ROOT / "tests"]))
    if "readme" in names:
        figures["readme"] = (len((ROOT / "README.md").read_text("utf8").split()),)
    if "commands" in names:
        figures["commands"] = (count_parameters(),)
    return figures, journeys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journeys", nargs="+", choices=TARGETS, default=[*TARGETS], help="rows of the table")
    parser.add_argument("--list", action="store_true", help="also list each function with its number of calls")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures, journeys = measure(options.journeys)
    if options.json:
        print(json.dumps(figures, indent=1))
        return 0
    print("| files, functions, calls (changes of file) | before | now | at most |\n|---|---:|---:|---:|")
    for name in options.journeys:
        title, before, most = TARGETS[name]
        now, switches = figures[name][:3], figures[name][3:]
        columns = [", ".join(f"{count:,}" for count in counts) for counts in (before, now, most)]
        columns[1] += "".join(f" ({count:,})" for count in switches)
        print(f"| {title} | {' | '.join(columns)} |")
    for name in (name for name in options.journeys if options.list and name in journeys):
        print(f"\n{TARGETS[name][0]}")
        names = (f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}" for code in journeys[name].calls)
        for text, count in Counter(names).items():
            print(f"{count:6}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
