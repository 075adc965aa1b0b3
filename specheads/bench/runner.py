"""Race decoders on the same prompts: repeated, and interleaved, so that a machine that slows down affects all alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Semaphore, Thread
from typing import Any

Clock = Callable[[], float]

# For races in which decoders take turns at each step: called when a step begins; returns when it is this decoder's turn
# again. None, the default: decoders do not take turns.
await_turn: ContextVar[Callable[[], None] | None] = ContextVar("await_turn", default=None)


@dataclass(frozen=True, slots=True)
class Output:
    """tokens: the generated ids of each row. statistics: those of generate(), if the decoder has them.

    gains: per row the tokens gained in each step, the prefill first; parts: seconds by part of the loop; both empty if
    the decoder does not report them. seconds: by the decoder's own clock, if it runs in another process. accepted: like
    gains, but only drafted tokens, if the decoder counts them. rows: decoded at a time, if texts are more than that.
    """

    tokens: list[list[int]]
    statistics: dict[str, Any] = field(default_factory=dict)
    gains: list[list[int]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    accepted: list[list[int]] = field(default_factory=list)
    rows: int | None = None


@dataclass(slots=True)
class Stopwatch:
    """A streamer that records each step's time and number of tokens. Only for batches of one row."""

    clock: Clock
    marks: list[tuple[int, float]] = field(default_factory=list)  # (tokens so far, time)
    prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if self.prompt_seen:
            so_far = self.marks[-1][0] if self.marks else 0
            self.marks.append((so_far + value.numel(), self.clock()))
        self.prompt_seen = True

    def end(self) -> None:
        """Part of the streamer protocol."""


Decoder = Callable[[dict[str, Any], Stopwatch | None], Output]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One prompt batch through one decoder. steps: (tokens gained, seconds) of each, only for batches of one row."""

    output: Output
    seconds: float
    steps: tuple[tuple[int, float], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.output.tokens))

    @property
    def gains(self) -> list[list[int]]:
        """Per row the tokens gained in each step, the prefill first; empty if unknown."""
        return self.output.gains or ([[gained for gained, _ in self.steps]] if self.steps else [])


@dataclass(frozen=True)
class Race:
    """runs[decoder][repeat][prompt batch]."""

    runs: dict[str, list[list[TimedRun]]]

    def speeds(self, name: str) -> list[float]:
        """Tokens per second of each repeat."""
        return [sum(r.num_tokens for r in runs) / sum(r.seconds for r in runs) for runs in self.runs[name]]

    def differing(self, name: str, reference: str) -> list[tuple[int, int, int]]:
        """(prompt batch, row, token) of the first difference of each pair of texts that differ in any repeat."""
        places = set()
        for repeat, other in zip(self.runs[name], self.runs[reference], strict=True):
            for i, (run, reference_run) in enumerate(zip(repeat, other, strict=True)):
                for row, (a, b) in enumerate(zip(run.output.tokens, reference_run.output.tokens, strict=True)):
                    if (token := first_difference(a, b)) is not None:
                        places.add((i, row, token))
        return sorted(places)


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index at which two texts first differ; the shorter one's length if it is a prefix of the other; None if equal."""
    if tokens == others:
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def race(
    decoders: dict[str, Decoder],
    batches: Sequence[dict[str, Any]],
    *,
    repeats: int = 3,
    budget: float | None = None,
    clock: Clock = time.perf_counter,
    report: Callable[[float, str], None] | None = None,
) -> Race:
    """Run every decoder on every batch of prompts `repeats` times, after one untimed warm-up each.

    The decoders take turns at each batch, in an order drawn anew. budget: seconds; a repeat, or in the first repeat a
    batch, that is likely to exceed them is skipped, for every decoder. report(fraction, decoder) is called before each
    run.
    """
    if not batches or not decoders:
        raise ValueError(f"a race needs prompts and decoders, not {len(batches)} and {len(decoders)}")
    names = list(decoders)
    runs: dict[str, list[list[TimedRun]]] = {name: [[] for _ in range(repeats)] for name in names}
    rounds = len(names) * (1 + repeats * len(batches))
    done = 0
    for name in names:
        if report:
            report(done / rounds, f"warming up: {name}")
        decoders[name](batches[0], None)
        done += 1
    freeze_heap()
    began, note = clock(), "done"
    for turn in turns(names, len(batches), repeats):
        if budget is not None and _overruns(clock() - began, turn, budget):
            note = "done" if turn.repeat else "out of time"
            break
        for name in turn.order:
            if report:
                report(done / rounds, name)
            runs[name][turn.repeat].append(time_batch(decoders[name], batches[turn.batch], clock))
            done += 1
    if report:
        report(1.0, note)
    return Race({name: [repeat for repeat in repeated if repeat] for name, repeated in runs.items()})


def freeze_heap() -> None:
    """Exclude the objects left by warm-ups from garbage collection. After compiling, a collection can take seconds,
    which would be counted as the time of whichever decoder is running."""
    gc.unfreeze()  # so that the objects of an earlier cell, no longer needed, can be collected
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt batch through all decoders, in this order."""

    repeat: int
    batch: int
    order: tuple[str, ...]


def turns(names: Sequence[str], num_batches: int, repeats: int) -> Iterator[Turn]:
    """Every prompt batch in every repeat. All decoders run on a batch before the next one, in an order drawn anew each
    time, so that none always finds caches and memory as the same other one left them. The orders are the same in every
    run."""
    draw = random.Random(0)
    for repeat in range(repeats):
        for batch in range(num_batches):
            yield Turn(repeat, batch, tuple(draw.sample(names, len(names))))


def _overruns(seconds: float, turn: Turn, budget: float) -> bool:
    """Would the repeat that starts with this turn (in the first repeat: this batch) end after the budget, if it took as
    long as the earlier ones did on average? seconds: taken so far."""
    if turn.batch:
        return not turn.repeat and seconds * (turn.batch + 1) / turn.batch > budget
    return bool(turn.repeat) and seconds * (turn.repeat + 1) / turn.repeat > budget


def time_batch(decoder: Decoder, batch: dict[str, Any], clock: Clock = time.perf_counter) -> TimedRun:
    watch = Stopwatch(clock) if len(batch["input_ids"]) == 1 else None
    began = clock()
    output = decoder(batch, watch)
    seconds = clock() - began if output.seconds is None else output.seconds
    marks = [(0, began), *(watch.marks if watch else [])]
    steps = tuple((n - m, t - s) for (m, s), (n, t) in pairwise(marks))
    return TimedRun(output, seconds, steps)


def time_by_steps(
    decoders: Mapping[str, Decoder], batch: dict[str, Any], clock: Clock = time.perf_counter
) -> dict[str, TimedRun | BaseException]:
    """One prompt batch through all decoders, which take turns at each step, in an order drawn anew each time.

    Whatever slows the machine down for a moment affects all of them, so their ratios are steadier than with turns of
    whole texts. But each finds less in the processor's caches than it would alone.

    A decoder that does not report its steps takes one turn for the whole text. If one raises, the exception is its
    result.
    """
    threads = {name: _Stepper(decoder, batch, clock) for name, decoder in decoders.items()}
    draw, waiting = random.Random(0), list(threads)
    while waiting:
        for name in draw.sample(waiting, len(waiting)):
            threads[name].take_turn()
        waiting = [name for name in waiting if threads[name].result is None]
    return {name: thread.result for name, thread in threads.items() if thread.result is not None}


class _Stepper(Thread):
    """One decoder in its own thread; only one such thread runs at a time. result: None until it is done."""

    def __init__(self, decoder: Decoder, batch: dict[str, Any], clock: Clock) -> None:
        super().__init__(daemon=True)
        self.decoder, self.batch, self.clock = decoder, batch, clock
        self.waited = 0.0
        self.result: TimedRun | BaseException | None = None
        self.turn, self.paused = Semaphore(0), Semaphore(0)

    def take_turn(self) -> None:
        """Run until the next step begins, or to the end."""
        if self.ident is None:
            self.start()
        self.turn.release()
        self.paused.acquire()

    def run(self) -> None:
        self.turn.acquire()
        await_turn.set(self._await_turn)
        try:
            self.result = time_batch(self.decoder, self.batch, lambda: self.clock() - self.waited)
        except BaseException as error:  # handed to whoever reads the result
            self.result = error
        finally:
            self.paused.release()

    def _await_turn(self) -> None:
        began = self.clock()
        self.paused.release()
        self.turn.acquire()
        self.waited += self.clock() - began
