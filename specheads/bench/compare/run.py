"""Runs `specheads bench`: every prompt batch through all decoders in turn, saving each round when it is done."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specheads.bench.compare.cell import BenchSetup, Cell
from specheads.bench.compare.decoder_spec import DecoderSpec
from specheads.bench.compare.decoder_texts import Ours, parse_decoder
from specheads.bench.compare.peer import PeerError
from specheads.bench.compare.prompt_sets import PromptSet
from specheads.bench.figures.identity import identify_base, identify_drafter, identify_machine
from specheads.bench.figures.results import NOTHING_DONE, RESULTS, Results, digest
from specheads.bench.figures.samples import Round, sample
from specheads.bench.follow_ups import CONVERSATIONS, texts_of, with_follow_ups
from specheads.bench.limits import draw_numbers
from specheads.bench.queues import batch_by_batch
from specheads.bench.runner import Decoder, TimedRun, freeze_heap, time_batch, time_by_steps, turns
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation import prompt_batches
from specheads.decoding.probs.randomness import row_seeds
from specheads.heads import DraftHead
from specheads.models.costs import auto_drafter
from specheads.options import OptionError, reason
from specheads.terminal import Report

TURNS = ("texts", "steps")


@dataclass(frozen=True)
class BenchOptions:
    """decoders: as text (see decoder_texts); reference: the one that the others are compared with. batch: numbers of
    rows; temperature: 0 is greedy. seed: of sampling and of the limits.

    lowest_limit: each prompt's limit is drawn from lowest_limit to max_new_tokens; None: all have the same. queue:
    prompts per round, which a refilling decoder takes as rows become free, and others batch by batch; None: one batch.
    turns: decoders take turns at whole `texts` or at `steps` (see `time_by_steps`)."""

    decoders: tuple[str, ...]
    reference: str = "transformers"
    batch: tuple[int, ...] = (1, 4, 16)
    temperature: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 96
    repeats: int = 3
    seed: int = 0
    lowest_limit: int | None = None
    queue: int | None = None
    turns: str = "texts"

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise OptionError(f"{{turns}}: expected {' or '.join(TURNS)}", turns=self.turns)
        if self.reference not in self.decoders:
            object.__setattr__(self, "decoders", (self.reference, *self.decoders))
        for name, least in (("batch", 1), ("temperature", 0)):
            values = getattr(self, name)
            if not values or not all(value >= least for value in values):
                raise OptionError(f"{{{name}}} must be at least {least}", **{name: ",".join(map(str, values))})
        for name in ("decoders", "batch", "temperature"):  # no duplicates
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        refills = [text for text in self.decoders if parse_decoder(text).refill]
        if self.queue is None and refills:
            raise OptionError(
                f"{refills[0]!r} refills rows from a queue of prompts; give {{queue}}, such as eight batches",
                queue=...,
            )
        if self.queue is not None and self.queue < max(self.batch):
            raise OptionError(f"{{queue}} must be at least a batch of {max(self.batch)}", queue=self.queue)
        if self.lowest_limit is not None and not 1 <= self.lowest_limit <= self.max_new_tokens:
            raise OptionError(
                "{max_new_tokens}: expected two numbers of at least 1, the smaller first",
                max_new_tokens=f"{self.lowest_limit}-{self.max_new_tokens}",
            )


@dataclass
class Outcome:
    """rounds: the finished ones; left_out: decoder → cell → why it did not run there. complete: are all rounds done?"""

    rounds: list[Round]
    left_out: dict[str, dict[str, str]]
    complete: bool


def run(options: BenchOptions, setup: BenchSetup, sets: Sequence[PromptSet], folder: Path, tell: Report) -> Outcome:
    """Measure every round that is not in `folder`/results.jsonl. Ctrl-C ends it early with the rounds so far, or raises
    KeyboardInterrupt if no round is done."""
    with Results(folder / RESULTS) as results:
        return _run(options, setup, sets, results, tell)


def _run(
    options: BenchOptions, setup: BenchSetup, sets: Sequence[PromptSet], results: Results, tell: Report
) -> Outcome:
    specs = {text: parse_decoder(text) for text in options.decoders}
    common = identity(options, setup, specs)
    outcome = Outcome([], {}, complete=True)
    cells = list(itertools.product(sets, options.batch, options.temperature))
    done = 0.0
    try:
        for number, (prompts, batch, temperature) in enumerate(cells):
            cell = _CellRun(Cell(prompts.name, batch, temperature), prompts, options, setup, specs, results, common)

            def within(fraction: float, note: str, number: int = number, cell: _CellRun = cell) -> None:
                nonlocal done
                done = min((number + fraction) / len(cells), 0.999)
                tell(done, f"{cell.cell}: {note}")

            try:
                cell.run(within)
            finally:
                outcome.rounds += cell.rounds
                for name, reason in cell.left_out.items():
                    outcome.left_out.setdefault(name, {})[str(cell.cell)] = reason
    except KeyboardInterrupt:
        if not outcome.rounds:
            raise KeyboardInterrupt(NOTHING_DONE) from None
        outcome.complete = False
        tell(done, "stopped")
    else:
        tell(1.0, f"{len(outcome.rounds)} rounds")
    return outcome


def identity(options: BenchOptions, setup: BenchSetup, specs: dict[str, DecoderSpec]) -> str:
    """A digest of everything a round depends on: the models, the decoders and their drafters, the machine, all versions
    (also of peers), and this package's own source, so that a changed program is measured again."""
    base = setup.models.target
    _refuse_lone_auto(setup, specs)
    drafters = [_drafter(setup, spec, name) for spec in specs.values() for name in spec.drafters]
    return digest(
        identify_base(base), options.decoders, options.reference,
        [identify_drafter(drafter, base.device.type) for drafter in drafters], options.max_new_tokens,
        options.lowest_limit, options.queue, options.turns, options.seed, identify_machine(base.device),
        _source_digest(),
        {name: [peer.command[0], peer.ask("versions")] for name, peer in setup.peers.items()},
    )  # fmt: skip


def _refuse_lone_auto(setup: BenchSetup, specs: dict[str, DecoderSpec]) -> None:
    """ValueError for `auto` without a head when heads are given by name, since it would use none of them."""
    if "head" in setup.models.drafters:
        return
    heads = (name for spec in specs.values() for name in spec.drafters if isinstance(setup.drafter(name), DraftHead))
    head = next(heads, None if setup.checkpoints is None else "HEAD")
    for text, spec in specs.items():
        if head is not None and any(name.partition(":")[0] == "auto" for name in spec.drafters):
            raise ValueError(f"decoder {text!r} has no head to draft with; name one: '{head} auto'")


def _drafter(setup: BenchSetup, spec: DecoderSpec, name: str) -> Drafter:
    """The drafter of this name; for `HEAD auto`, the automatic drafter with its step costs."""
    drafter = setup.drafter(name)
    if isinstance(spec, Ours) and spec.auto and isinstance(drafter, DraftHead):
        return auto_drafter(setup.models.target, drafter)
    return drafter


def _source_digest() -> str:
    package = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


class _CellRun:
    """Measures the rounds of one cell, or reads those already done."""

    def __init__(
        self, cell: Cell, prompts: PromptSet, options: BenchOptions, setup: BenchSetup, specs: dict[str, DecoderSpec],
        results: Results, common: str,
    ) -> None:  # fmt: skip
        self.cell, self.prompts, self.options, self.setup, self.results = cell, prompts, options, setup, results
        self.specs = specs
        asked = [one.key for one in prompts.conversations]
        self.common = digest(common, str(cell), prompts.ids, prompts.categories, asked)
        tokenizer, device = setup.models.tokenizer, setup.models.target.device
        self.queue = options.queue or cell.batch
        self.batches: list[dict[str, Any]] = [*prompt_batches.batches(tokenizer, prompts.ids, device, self.queue)]
        if prompts.conversations:
            for index, batch in enumerate(self.batches):
                batch[CONVERSATIONS] = prompts.conversations[index * self.queue : (index + 1) * self.queue]
        if cell.temperature:
            # By the prompt's index, so that no two prompts draw the same numbers, whatever the batch and decoder.
            seeds = row_seeds(options.seed, len(prompts.ids))
            for index, batch in enumerate(self.batches):
                batch["seeds"] = seeds[index * self.queue : (index + 1) * self.queue]
        if options.lowest_limit is not None:
            limits = draw_numbers(
                len(prompts.ids), options.lowest_limit, options.max_new_tokens, options.seed, f"limits {prompts.name}"
            )
            for index, batch in enumerate(self.batches):
                batch["limits"] = limits[index * self.queue : (index + 1) * self.queue]
        self.rounds: list[Round] = []
        self.left_out: dict[str, str] = {}
        self._decoders: dict[str, Decoder] = {}

    def run(self, tell: Report) -> None:
        refusals = {name: spec.refusal(self.cell) for name, spec in self.specs.items()}
        self.left_out = {name: reason for name, reason in refusals.items() if reason is not None}
        names = [name for name in self.specs if name not in self.left_out]
        total = self.options.repeats * len(self.batches)
        for number, turn in enumerate(turns(names, len(self.batches), self.options.repeats)):
            key = digest(self.common, turn.repeat, turn.batch)
            if key not in self.results.rows:
                tell_name = partial(tell, number / total)
                if not self._decoders:
                    self._warm_up([name for name in names if name not in self.left_out], tell_name)
                order = [name for name in turn.order if name in self._decoders]
                self.results.add(key, self._measure(turn.repeat, turn.batch, order, tell_name))
            row = self.results.rows[key]
            self.left_out |= row["left_out"]
            self.rounds.append({name: value for name, value in row.items() if name != "left_out"})

    def _warm_up(self, names: Sequence[str], tell: Callable[[str], None]) -> None:
        """Build each decoder and run it untimed on the shortest and longest batch of each number of rows, for which it
        may compile, or on all batches if what it compiles depends on the text.

        A decoder that cannot run in this cell is left out, unless it is the reference."""
        by_rows: dict[int, list[dict[str, Any]]] = {}
        for batch in self.batches:
            by_rows.setdefault(len(batch["input_ids"]), []).append(batch)
        chosen = []
        for batches in by_rows.values():
            batches = sorted(batches, key=lambda batch: batch["input_ids"].shape[1])
            chosen += [batches[0], batches[-1]] if len(batches) > 1 else batches
        for name in names:
            tell(f"warming up {name}")
            try:
                decoder = self.specs[name].build(self.setup, self.cell)
                if not self.specs[name].refill:
                    decoder = batch_by_batch(decoder, self.cell.batch)
                decoder = with_follow_ups(decoder, self.setup.models.tokenizer)
                for batch in self.batches if self.specs[name].compiles_as_needed else chosen:
                    decoder(batch, None)
            except (ValueError, RuntimeError) as error:
                self._leave_out(name, error)
            else:
                self._decoders[name] = decoder
        freeze_heap()

    def _leave_out(self, name: str, error: Exception) -> None:
        """Drop the decoder from this cell. An error for the reference: there is nothing else to compare with."""
        why = " ".join(str(error).split())
        if isinstance(error, RuntimeError):  # torch's, as without a compiler or memory: its first line says why
            why = reason(str(error).strip().partition("\n")[0]) or type(error).__name__
        if name == self.options.reference:
            if isinstance(error, ValueError):
                raise error
            raise ValueError(f"the reference {name!r} failed in {self.cell}: {why}") from error
        self.left_out[name] = why
        self._decoders.pop(name, None)

    def _measure(self, repeat: int, index: int, order: Sequence[str], tell: Callable[[str], None]) -> Round:
        runs: dict[str, TimedRun] = {}
        for name, run in self._run_in_turn(self.batches[index], order, tell):
            if isinstance(run, PeerError | RuntimeError):
                self._leave_out(name, run)
            elif isinstance(run, BaseException):
                raise run
            else:
                runs[name] = run
        reference = None if self.cell.temperature else runs[self.options.reference]
        first = index * self.queue
        return {
            "prompts": self.cell.prompts, "batch": self.cell.batch, "temperature": self.cell.temperature,
            "repeat": repeat, "index": index,
            "categories": [self.prompts.categories[first + row] for row in texts_of(self.batches[index])],
            "order": list(runs),
            "decoders": {name: sample(runs[name], reference) for name in self.specs if name in runs},
            "left_out": dict(self.left_out),
        }  # fmt: skip

    def _run_in_turn(
        self, batch: dict[str, Any], order: Sequence[str], tell: Callable[[str], None]
    ) -> Iterator[tuple[str, TimedRun | BaseException]]:
        if self.options.turns == "steps":
            tell("all decoders, step by step")
            yield from time_by_steps({name: self._decoders[name] for name in order}, batch).items()
            return
        for name in order:
            tell(name)
            try:
                yield name, time_batch(self._decoders[name], batch)
            except (PeerError, RuntimeError) as error:
                yield name, error
