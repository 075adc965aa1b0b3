"""Race decoders on the same prompts: interleaved, repeated, and compared by ratios inside one run.

A decoder's speed in one repeat is all its tokens over all its seconds; the median over repeats is reported. A speed-up
is the median of the ratios of each repeat, so a machine that slows down slows both sides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

Clock = Callable[[], float]
GRAM = 8  # a token that completes this many tokens seen together before counts as repeated text


@dataclass(frozen=True, slots=True)
class Output:
    """tokens: the generated ids of each row. statistics: of generate(), if the decoder has them.

    gains: per row the tokens of each step, the prefill first; parts: seconds by part of the loop; both empty where the
    decoder does not report them. seconds: by the decoder's own clock, if it runs in another process.
    """

    tokens: list[list[int]]
    statistics: dict[str, Any] = field(default_factory=dict)
    gains: list[list[int]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(slots=True)
class Stopwatch:
    """A streamer: the time of each step, and how many tokens it gave. Only for batches of one row."""

    clock: Clock
    marks: list[tuple[int, float]] = field(default_factory=list)  # tokens so far, when
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
class Run:
    """One prompt batch through one decoder. steps: (tokens gained, seconds) each, of batches of one row."""

    output: Output
    seconds: float
    steps: tuple[tuple[int, float], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.output.tokens))

    @property
    def gains(self) -> list[list[int]]:
        """Per row the tokens of each step, the prefill first; empty if unknown."""
        return self.output.gains or ([[gained for gained, _ in self.steps]] if self.steps else [])


@dataclass(frozen=True, slots=True)
class Part:
    """Speed and accepted length on one kind of text. share: of all tokens."""

    share: float
    tokens_per_second: float
    accepted_length: float


@dataclass(frozen=True)
class Race:
    """runs[decoder][repeat][prompt batch]."""

    runs: dict[str, list[list[Run]]]

    def speeds(self, name: str) -> list[float]:
        """Tokens per second of each repeat."""
        return [sum(r.num_tokens for r in runs) / sum(r.seconds for r in runs) for runs in self.runs[name]]

    def tokens_per_second(self, name: str) -> float:
        return median(self.speeds(name))

    def speed_up(self, name: str, reference: str) -> float:
        pairs = zip(self.speeds(name), self.speeds(reference), strict=True)
        return median(own / other for own, other in pairs)

    def accepted_length(self, name: str) -> float | None:
        """Tokens a step after the prefill, including the target's own; None if the decoder does not report them."""
        runs = self.runs[name][0]
        if all(run.steps for run in runs):
            later = [gained for run in runs for gained, _ in run.steps[1:]]
            return sum(later) / len(later) if later else 1.0
        known = [run.output.statistics for run in runs]
        if not all("rows_stepped" in s for s in known):
            return None
        stepped = sum(s["rows_stepped"] for s in known)
        return sum(s["gained"] for s in known) / stepped if stepped else 1.0

    def accepted_by_depth(self, name: str) -> list[float]:
        """Share of steps that accepted a draft at depth 1, 2, …"""
        known = [run.output.statistics for run in self.runs[name][0]]
        if not all("accepted_by_depth" in s for s in known):
            return []
        steps = sum(s["rows_stepped"] for s in known)
        deepest = max(len(s["accepted_by_depth"]) for s in known)
        at = [
            sum(s["accepted_by_depth"][d] * s["rows_stepped"] for s in known if d < len(s["accepted_by_depth"]))
            for d in range(deepest)
        ]
        return [count / steps for count in at] if steps else []

    def differing(self, name: str, reference: str) -> list[tuple[int, int, int]]:
        """(prompt batch, row, token) of the first difference between two texts, in any repeat; [] if all are equal."""
        found = set()
        for own, other in zip(self.runs[name], self.runs[reference], strict=True):
            for i, (mine, theirs) in enumerate(zip(own, other, strict=True)):
                for row, (a, b) in enumerate(zip(mine.output.tokens, theirs.output.tokens, strict=True)):
                    if (token := first_difference(a, b)) is not None:
                        found.add((i, row, token))
        return sorted(found)

    def parts(self, name: str) -> dict[str, Part]:
        """Figures for steps whose first token continues new text (`unrepeated`) or text seen before (`repeated`).

        Only for batches of one row; a part without steps is left out.
        """
        totals: dict[str, list[list[float]]] = {"unrepeated": [], "repeated": []}
        counted = {"unrepeated": [0.0, 0.0], "repeated": [0.0, 0.0]}  # tokens and steps after the prefill
        for runs in self.runs[name]:
            splits = [split_by_text(run) for run in runs]
            for kind in totals:
                tokens, seconds, gained, steps = (
                    sum(figures) for figures in zip(*(s[kind] for s in splits), strict=True)
                )
                counted[kind][0] += gained
                counted[kind][1] += steps
                if tokens:
                    totals[kind].append([tokens, seconds])
        every = sum(tokens for rows in totals.values() for tokens, _ in rows)
        return {
            kind: Part(
                sum(tokens for tokens, _ in rows) / every,
                median(tokens / seconds for tokens, seconds in rows),
                counted[kind][0] / counted[kind][1] if counted[kind][1] else 1.0,
            )
            for kind, rows in totals.items()
            if rows
        }


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Where two texts first differ; at the end of the shorter if it begins the longer, None if they are equal."""
    if tokens == others:
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def split_by_text(run: Run) -> dict[str, list[float]]:
    """Tokens, seconds, and tokens and steps after the prefill, of steps whose first token continues new text
    (`unrepeated`) or text seen before (`repeated`). Of a batch of one row; zeros where the steps are unknown."""
    sums: dict[str, list[float]] = {"unrepeated": [0, 0.0, 0, 0], "repeated": [0, 0.0, 0, 0]}
    again, position = repeated(run.output.tokens[0]), 0
    for number, (gained, seconds) in enumerate(run.steps):
        kind = "repeated" if position < len(again) and again[position] else "unrepeated"
        for i, figure in enumerate((gained, seconds, gained if number else 0, 1 if number else 0)):
            sums[kind][i] += figure
        position += gained
    return sums


def repeated(tokens: Sequence[int], gram: int = GRAM) -> list[bool]:
    """Per token: do the `gram` tokens that end with it occur earlier in the same generated text?"""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(tokens) + 1):
        window = tuple(tokens[max(0, end - gram) : end])
        marks.append(window in seen)
        if len(window) == gram:
            seen.add(window)
    return marks


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

    The decoders take turns at each batch, in an order drawn anew. budget: seconds that no further repeat may
    exceed, nor a further batch of the first repeat; what is skipped is skipped for every decoder. report(fraction,
    decoder) is called before each run.
    """
    if not batches or not decoders:
        raise ValueError(f"a race needs prompts and decoders, not {len(batches)} and {len(decoders)}")
    names = list(decoders)
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(repeats)] for name in names}
    rounds = len(names) * (1 + repeats * len(batches))
    done = 0
    for name in names:
        if report:
            report(done / rounds, f"warming up: {name}")
        decoders[name](batches[0], None)
        done += 1
    began, note = clock(), "done"
    for turn in turns(names, len(batches), repeats):
        if budget is not None and _overruns(clock() - began, turn, budget):
            note = "done" if turn.repeat else "out of time"
            break
        for name in turn.order:
            if report:
                report(done / rounds, name)
            runs[name][turn.repeat].append(timed(decoders[name], batches[turn.batch], clock))
            done += 1
    if report:
        report(1.0, note)
    return Race({name: [repeat for repeat in repeated if repeat] for name, repeated in runs.items()})


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt batch through all decoders, in this order."""

    repeat: int
    batch: int
    order: tuple[str, ...]


def turns(names: Sequence[str], num_batches: int, repeats: int) -> Iterator[Turn]:
    """Every prompt batch in every repeat. All decoders run on a batch before the next one, in an order drawn anew each
    time, so that none always runs in the caches and memory that one other leaves. The draws are the same in every run.
    """
    draw = random.Random(0)
    for repeat in range(repeats):
        for batch in range(num_batches):
            yield Turn(repeat, batch, tuple(draw.sample(names, len(names))))


def _overruns(seconds: float, turn: Turn, budget: float) -> bool:
    """Would the repeat that this turn begins, or in the first repeat this batch, end after the budget, if it took as
    long as those in the `seconds` before it?"""
    if turn.batch:
        return not turn.repeat and seconds * (turn.batch + 1) / turn.batch > budget
    return bool(turn.repeat) and seconds * (turn.repeat + 1) / turn.repeat > budget


def timed(decoder: Decoder, batch: dict[str, Any], clock: Clock = time.perf_counter) -> Run:
    watch = Stopwatch(clock) if len(batch["input_ids"]) == 1 else None
    began = clock()
    output = decoder(batch, watch)
    seconds = clock() - began if output.seconds is None else output.seconds
    marks = [(0, began), *(watch.marks if watch else [])]
    steps = tuple((n - m, t - s) for (m, s), (n, t) in pairwise(marks))
    return Run(output, seconds, steps)
