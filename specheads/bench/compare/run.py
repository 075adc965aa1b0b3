"""Runs `specheads bench`: every prompt batch through all decoders in turn, saving each round when it is done."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specheads.bench.batches import CONVERSATIONS, batch_by_batch, draw_numbers, texts_of, with_follow_ups
from specheads.bench.compare.decoder_spec import BenchSetup, Cell, DecoderSpec
from specheads.bench.compare.decoder_texts import Ours, expand, parse_decoder
from specheads.bench.compare.judge import distance
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.peer import PeerError
from specheads.bench.compare.prompt_sets import PromptSet
from specheads.bench.compare.recorded import record_of, replayed
from specheads.bench.figures.identity import identify_base, identify_drafter, identify_machine
from specheads.bench.figures.results import NOTHING_DONE, RESULTS, Results, digest
from specheads.bench.figures.samples import Round, sample
from specheads.bench.runner import Decoder, TimedRun, freeze_heap, time_batch, time_by_steps, turns
from specheads.decoding.drafters import Cascade, Drafter
from specheads.decoding.generation import prompt_batches
from specheads.decoding.generation.recorded import Record
from specheads.decoding.planner import as_plan
from specheads.decoding.probs.randomness import row_seeds
from specheads.heads import DraftHead
from specheads.models.costs import auto_drafter
from specheads.options import OptionError, reason
from specheads.terminal import Report

WARM_UP_TOKENS = 8


@dataclass
class Outcome:
    """rounds: the finished ones; left_out: decoder → cell → why it did not run there. complete: are all rounds done?"""

    rounds: list[Round]
    left_out: dict[str, dict[str, str]]
    complete: bool


def decoders_of(options: BenchOptions, default: Sequence[str] = ()) -> dict[str, DecoderSpec]:
    """Text → spec of the decoders to measure, the reference first unless it is among the others.

    ValueError for decoders that the other options do not allow."""
    texts = expand(options.decoder or default, options.tree, options.accept)
    if options.reference not in texts:
        texts = [options.reference, *texts]
    specs = {text: parse_decoder(text) for text in texts}
    for text, spec in specs.items():
        if spec.refill and options.queue is None:
            raise OptionError(
                f"{text!r} refills rows from a queue of prompts; give {{queue}}, such as eight batches", queue=...
            )
        greedy = options.samplings == [(0.0, 0)]
        if options.record and not (
            isinstance(spec, Ours) and greedy and spec.accept in (None, "exact") and not spec.auto
        ):
            raise OptionError(
                f"{{record}} replays greedy text under the exact rule, with our drafts, and not {text!r}; give "
                "{reference} plain, {temperature} 0 and drafters alone",
                record=..., reference=..., temperature=...,
            )  # fmt: skip
    return specs


def run(
    options: BenchOptions, setup: BenchSetup, specs: dict[str, DecoderSpec], sets: Sequence[PromptSet], tell: Report
) -> Outcome:
    """Measure every round that is not in options.out/results.jsonl. Ctrl-C ends it early with the rounds so far, or
    raises KeyboardInterrupt if no round is done."""
    with Results(options.out / RESULTS) as results:
        return _run(options, setup, specs, sets, results, tell)


def _run(
    options: BenchOptions, setup: BenchSetup, specs: dict[str, DecoderSpec], sets: Sequence[PromptSet],
    results: Results, tell: Report,
) -> Outcome:  # fmt: skip
    common = identity(options, setup, specs)
    known = None
    if options.record is not None:
        tell(0.0, "recording the target")
        every = [ids for prompt_set in sets for ids in prompt_set.ids]
        known = record_of(options.record, setup.models.target, every, setup.max_new_tokens)
        common = digest(common, hashlib.sha256(options.record.read_bytes()).hexdigest())
    outcome = Outcome([], {}, complete=True)
    cells = list(itertools.product(sets, options.batch, options.samplings))
    done = 0.0
    try:
        for number, (prompts, batch, sampling) in enumerate(cells):
            of = Cell(prompts.name, batch, *sampling)
            cell = _CellRun(of, prompts, options, setup, specs, results, common, known)

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
    drafters = [drafter for spec in specs.values() for drafter in _drafters(setup, spec)]
    return digest(
        identify_base(base), list(specs), options.reference,
        [identify_drafter(drafter, base.device.type) for drafter in drafters], options.max_new_tokens,
        options.queue, options.turns, options.seed, identify_machine(base.device), _source_digest(),
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


def _drafters(setup: BenchSetup, spec: DecoderSpec) -> list[Drafter]:
    """The drafters of a decoder; of a cascade its parts; for `HEAD auto`, the automatic drafter with its step costs."""
    loaded = [setup.drafter(name) for name in spec.drafters]
    if isinstance(spec, Ours) and isinstance(cascade := spec.load(setup), Cascade):
        return list(cascade.drafts)
    if isinstance(spec, Ours) and spec.auto:
        return [
            auto_drafter(setup.models.target, drafter) if isinstance(drafter, DraftHead) else drafter
            for drafter in loaded
        ]
    return loaded


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
        results: Results, common: str, known: Record | None = None,
    ) -> None:  # fmt: skip
        self.cell, self.prompts, self.options, self.setup, self.results = cell, prompts, options, setup, results
        self.specs, self.known = specs, known
        asked = [conversation.key for conversation in prompts.conversations]
        answers = [question.answer for question in prompts.task.questions] if prompts.task else []
        self.common = digest(common, str(cell), prompts.ids, prompts.categories, asked, answers)
        tokenizer, base = setup.models.tokenizer, setup.models.target
        self.queue = options.queue or cell.batch
        side = "right" if base.config.is_encoder_decoder else "left"
        self.batches: list[dict[str, Any]] = [
            *prompt_batches.batches(tokenizer, prompts.ids, base.device, self.queue, side=side)
        ]
        if prompts.conversations:
            for index, batch in enumerate(self.batches):
                batch[CONVERSATIONS] = prompts.conversations[index * self.queue : (index + 1) * self.queue]
        if cell.temperature:
            # By the prompt's index, so that no two prompts draw the same numbers, whatever the batch and decoder.
            seeds = row_seeds(options.seed, len(prompts.ids))
            for index, batch in enumerate(self.batches):
                batch["seeds"] = seeds[index * self.queue : (index + 1) * self.queue]
        fewest, most = options.limits
        if fewest is not None:
            limits = draw_numbers(len(prompts.ids), fewest, most, options.seed, f"limits {prompts.name}")
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
        shard, shards = self.options.part
        for number, turn in enumerate(turns(names, len(self.batches), self.options.repeats)):
            if turn.batch % shards != shard:
                continue
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
        """Build each decoder and run it untimed: a few tokens of the shortest batch or, if it compiles, all of the
        shortest and longest batch of each number of rows; of every batch if what it compiles depends on the text.

        A decoder that cannot run in this cell is left out, unless it is the reference."""
        batches = sorted(self.batches, key=lambda batch: (len(batch["input_ids"]), batch["input_ids"].shape[1]))
        few = {name: values for name, values in batches[0].items() if name != CONVERSATIONS}
        few["limits"] = [min(WARM_UP_TOKENS, self.setup.max_new_tokens)] * len(few["input_ids"])
        ends: list[dict[str, Any]] = []
        for _, same in itertools.groupby(batches, key=lambda batch: len(batch["input_ids"])):
            first, *others = same
            ends += [first, *others[-1:]]
        for name in names:
            tell(f"warming up {name}")
            try:
                decoder = self._build(name)
                if not self.specs[name].refill:
                    decoder = batch_by_batch(decoder, self.cell.batch)
                decoder = with_follow_ups(decoder, self.setup.models.tokenizer)
                spec = self.specs[name]
                for batch in self.batches if spec.compiles_as_needed else ends if spec.compiles else [few]:
                    decoder(batch, None)
            except (ValueError, RuntimeError) as error:
                self._leave_out(name, error)
            else:
                self._decoders[name] = decoder
        freeze_heap()

    def _build(self, name: str) -> Decoder:
        spec = self.specs[name]
        if self.known is None or not isinstance(spec, Ours):
            return spec.build(self.setup, self.cell)
        drafter = spec.load(self.setup)
        plan = None if drafter is None or spec.tree is None else as_plan(spec.tree, drafter)
        return replayed(self.known, drafter, plan, self.setup.models.target.device)

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
            "top_k": self.cell.top_k, "repeat": repeat, "index": index,
            "categories": [self.prompts.categories[first + row] for row in texts_of(self.batches[index])],
            "order": list(runs),
            "decoders": {
                name: sample(runs[name], reference) | self._judge(runs[name], first, repeat)
                for name in self.specs if name in runs
            },
            "left_out": dict(self.left_out),
        }  # fmt: skip

    def _judge(self, run: TimedRun, first: int, repeat: int) -> dict[str, Any]:
        """In the first repeat: which answers are right, if the prompts have any; and, if a rule is lossy, the distance
        of the texts from the target, as a sum of nats and the number of tokens with p = 0. first: index of the first
        prompt."""
        texts, known, task = run.output.tokens, dict[str, Any](), self.prompts.task
        if repeat:
            return known
        if task is not None:
            read = [self.setup.models.tokenizer.decode(text, skip_special_tokens=True) for text in texts]
            asked = task.questions[first : first + len(texts)]
            known["right"] = [task.correct(text, question) for text, question in zip(read, asked, strict=True)]
        if self.setup.neutral and not self.prompts.conversations:
            prompts, (base, cell) = self.prompts.ids[first : first + len(texts)], (self.setup.models.target, self.cell)
            pairs = zip(prompts, texts, strict=True)
            far = [distance(base, ids, text, cell.temperature, cell.top_k) for ids, text in pairs]
            known |= {"nats": sum(nats for nats, _ in far), "outside": sum(outside for _, outside in far)}
        return known

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
