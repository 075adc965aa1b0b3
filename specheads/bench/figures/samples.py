"""A timed run as plain values (a Sample), and a decoder's figures over many: speed, ratio, accepted length, time split.

A Round is one prompt batch through all decoders: {"prompts": name of the set, "batch": rows, "temperature", "repeat",
"index": of the batch, "categories": of its rows, "order": of the decoders, "decoders": {name: Sample}}.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from specheads.bench.figures.intervals import Work, ratio_interval, speed
from specheads.bench.runner import Race, TimedRun, first_difference
from specheads.decoding.results import POSITIONS, AcceptanceCounts, counts_by_range

Sample = dict[str, Any]
Round = dict[str, Any]
GRAM = 8  # a token counts as repeated if the n-gram of this length that it completes has occurred before


def sample(run: TimedRun, reference: TimedRun | None = None) -> Sample:
    """A run as a Sample, whose keys are: seconds of the whole run; tokens: number of each row; gains: per row the
    tokens gained in each step, the prefill first, [] if unknown; prefill: its seconds, None if unknown; parts: seconds
    by part of the loop; differs_at: per row the index of the first token that differs from the reference's, None where
    the texts are equal; and, if the decoder counts them, gained and rows_stepped: tokens after the prefill and the
    steps that gave them; steps: of the loop; accepted_nodes: how often each node of a tree was accepted; draft_reviews:
    passes of each draft of a cascade; accepted: like gains, but only drafted tokens; rows: decoded at a time, if the
    texts are more than that, since a conversation has a text for each turn.

    by_text: the result of split_by_text, for a batch of one row. Without a reference, differs_at is None."""
    parts = dict(run.output.parts)
    prefill = parts.pop("prefill", run.steps[0][1] if run.steps else None)
    differs = None
    if reference is not None:
        pairs = zip(run.output.tokens, reference.output.tokens, strict=True)
        differs = [first_difference(row, other) for row, other in pairs]
    known = run.output.statistics
    names = ("gained", "rows_stepped", "steps", "accepted_nodes", "draft_reviews")
    counts: dict[str, Any] = {name: known[name] for name in names if name in known}
    if run.output.accepted:
        counts["accepted"] = run.output.accepted
    if run.output.rows is not None:
        counts["rows"] = run.output.rows
    if run.steps:
        counts["by_text"] = split_by_text(run)
    return {
        "seconds": run.seconds, "tokens": [len(row) for row in run.output.tokens], "gains": run.gains,
        "prefill": prefill, "parts": parts, "differs_at": differs, **counts,
    }  # fmt: skip


def rounds_of(race: Race, reference: str) -> list[Round]:
    """The rounds of a race, with texts compared with the reference's, and without categories."""
    rounds = []
    for repeat, runs in enumerate(race.runs[reference]):
        for index, run in enumerate(runs):
            samples = {name: sample(race.runs[name][repeat][index], run) for name in race.runs}
            categories = [None] * len(run.output.tokens)
            rounds.append({"repeat": repeat, "index": index, "categories": categories, "decoders": samples})
    return rounds


def samples_by_batch(rounds: Iterable[Round], name: str) -> dict[int, list[Sample]]:
    """Index of the prompt batch → the decoder's samples of it, one for each repeat."""
    batches: dict[int, list[Sample]] = {}
    for round_ in sorted(rounds, key=lambda round_: round_["index"]):
        batches.setdefault(round_["index"], []).append(round_["decoders"][name])
    return batches


def work_of(rounds: Iterable[Round], name: str) -> dict[int, tuple[float, float]]:
    """Index of the prompt batch → tokens and seconds, each the median over repeats."""
    return {
        index: (median(sum(s["tokens"]) for s in samples), median(s["seconds"] for s in samples))
        for index, samples in samples_by_batch(rounds, name).items()
    }


def figures(rounds: Sequence[Round], name: str, reference: str) -> dict[str, Any]:
    """The figures of one decoder in rounds with the same prompt set, batch size and temperature.

    tokens and seconds: of all prompts, each with its median. speed_up: speed divided by the reference's, with its 95 %
    interval; same_text: number of rows in the first repeat
    whose text equals the reference's, None if not compared. accepted_length: tokens per step and row, without the
    prefill; None if unknown, like its breakdowns. shares: of the run's seconds. step_seconds: of one step of a batch.
    """
    by_batch, other = work_of(rounds, name), work_of(rounds, reference)
    work: Work = list(by_batch.values())
    base: Work = [other[index] for index in by_batch]
    samples = [round_["decoders"][name] for round_ in rounds]
    interval = ratio_interval(work, base)
    first = [round_ for round_ in rounds if round_["repeat"] == min(r["repeat"] for r in rounds)]
    texts = [at for round_ in first for at in round_["decoders"][name]["differs_at"] or ()]
    compared = all(round_["decoders"][name]["differs_at"] is not None for round_ in first)
    return {
        "tokens": sum(tokens for tokens, _ in work),
        "seconds": sum(seconds for _, seconds in work),
        "tokens_per_second": speed(work),
        "speed_up": speed(work) / speed(base),
        "speed_up_interval": None if interval is None else list(interval),
        "same_text": sum(at is None for at in texts) if compared else None,
        "texts": sum(len(round_["categories"]) for round_ in first),
        **accepted(first, name),
        **time_split(samples),
        "by_text": by_text(rounds, name, reference),
        **judged(first, name),
    }


def judged(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """What texts are worth: accuracy, the share of right answers; nats a token from the target, over tokens that it
    does not rule out, and the number of those that it does (`outside`); reviews by the target and by each draft of a
    cascade, and the tokens that they gained. None if unknown."""
    samples = [round_["decoders"][name] for round_ in rounds]
    right = [answer for s in samples for answer in s.get("right", ())]
    scored = [s for s in samples if "nats" in s]
    outside = sum(s["outside"] for s in scored)
    inside = sum(sum(s["tokens"]) for s in scored) - outside
    reviews = None
    if all("draft_reviews" in s for s in samples):
        passes = [[s["rows_stepped"], *s["draft_reviews"]] for s in samples]
        reviews = [sum(column) for column in zip(*passes, strict=True)]
    return {
        "accuracy": sum(right) / len(right) if right else None,
        "nats": sum(s["nats"] for s in scored) / inside if inside else None,
        "outside": outside if scored else None,
        "reviews": reviews,
        "gained": sum(s["gained"] for s in samples) if reviews else None,
    }


def accepted(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """Accepted length overall, by the prompt's category and by the range of output positions in which the step began
    (its first position → accepted length); and the share of steps that accepted a draft at depth 1, 2, …, and each node
    of a tree (sibling ranks on the path to it → share).

    If a decoder does not report how many of a step's tokens were drafted, all but the last are assumed to be."""
    gains: list[int] = []
    drafts: list[int] = []
    by_category: dict[str, list[int]] = {}
    rows: list[list[int]] = []
    counts = [(s["gained"], s["rows_stepped"]) for s in (r["decoders"][name] for r in rounds) if "gained" in s]
    for round_ in rounds:
        of_rows = round_["decoders"][name]["gains"]
        drafted = round_["decoders"][name].get("accepted") or [[gained - 1 for gained in row] for row in of_rows]
        drafts += [count for row in drafted for count in row[1:]]
        for row, category in zip(of_rows, round_["categories"], strict=False):
            rows.append(row)
            gains += row[1:]
            if category:
                by_category.setdefault(category, []).extend(row[1:])
    if not gains:
        total, steps = sum(n for n, _ in counts), sum(n for _, n in counts)
        return {
            "accepted_length": total / steps if steps else None, "accepted_drafts": None, "accepted_by_depth": None,
            "accepted_by_category": None, "accepted_by_position": None, "accepted_nodes": None,
        }  # fmt: skip
    nodes: Counter[str] = Counter()
    for round_ in rounds:
        nodes.update(round_["decoders"][name].get("accepted_nodes", {}))
    counted = AcceptanceCounts.count(gains, drafts)
    return {
        "accepted_length": counted.tokens_per_step,
        "accepted_drafts": sum(counted.by_depth),
        "accepted_by_depth": counted.shares,
        "accepted_by_category": {category: _mean(values) for category, values in sorted(by_category.items())} or None,
        "accepted_by_position": {str(at): c.tokens_per_step for at, c in counts_by_range(rows, POSITIONS).items()},
        "accepted_nodes": {path: count / len(gains) for path, count in nodes.most_common()} or None,
    }


def by_text(rounds: Sequence[Round], name: str, reference: str) -> dict[str, dict[str, Any]] | None:
    """Share of the tokens, speed, ratio and accepted length on new text (`unrepeated`) and on text that repeats itself
    (`repeated`), if there is any; None unless both decoders report the time of their steps."""
    batches, other = samples_by_batch(rounds, name), samples_by_batch(rounds, reference)
    if not all(s.get("by_text") for samples in (*batches.values(), *other.values()) for s in samples):
        return None
    work = {kind: text_work(batches, kind) for kind in ("unrepeated", "repeated")}
    every = sum(tokens for tokens, *_ in work.values())
    parts = {}
    for kind, (tokens, seconds, gained, steps) in work.items():
        other_tokens, other_seconds, *_ = text_work(other, kind)
        if tokens:
            parts[kind] = {
                "share": tokens / every,
                "tokens_per_second": tokens / seconds,
                "speed_up": tokens / seconds / (other_tokens / other_seconds) if other_tokens else None,
                "accepted_length": gained / steps if steps else None,
            }
    return parts


def text_work(batches: dict[int, list[Sample]], kind: str) -> list[float]:
    """The four figures of split_by_text: each prompt batch's medians over the repeats, summed over the batches."""
    of_batches = (zip(*(s["by_text"][kind] for s in samples), strict=True) for samples in batches.values())
    return [sum(medians) for medians in zip(*(map(median, figures) for figures in of_batches), strict=True)]


def time_split(samples: Sequence[Sample]) -> dict[str, Any]:
    """Shares of the seconds by part, None if the decoder does not report them; and the median seconds of a full batch's
    step and of its verification, None if unknown."""
    seconds = sum(s["seconds"] for s in samples)
    shares = None
    if all(s["parts"] for s in samples):
        shares = {part: sum(s["parts"].get(part, 0.0) for s in samples) / seconds for part in samples[0]["parts"]}
        shares = {"prefill": sum(s["prefill"] or 0.0 for s in samples) / seconds, **shares}
    sizes = [s.get("rows", len(s["tokens"])) for s in samples]
    whole = [
        s for s, size in zip(samples, sizes, strict=True) if size == max(sizes)
    ]  # the last batch may have fewer rows and so faster steps
    steps = [s.get("steps") or max((len(row) - 1 for row in s["gains"]), default=0) for s in whole]
    known = [
        ((s["seconds"] - s["prefill"]) / n, s["parts"].get("verify", 0.0) / n)
        for s, n in zip(whole, steps, strict=True)
        if n and s["prefill"] is not None
    ]
    apart = shares is not None and shares.get("step", 0.0) < 0.01  # else verification is part of a compiled step
    return {
        "shares": shares,
        "step_seconds": median(step for step, _ in known) if known else None,
        "verify_seconds": median(verify for _, verify in known) if known and apart else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def split_by_text(run: TimedRun) -> dict[str, list[float]]:
    """Four figures each for steps whose first token continues new text (`unrepeated`) or repeated text (`repeated`):
    tokens, seconds, tokens after the prefill, steps after it. For a batch of one row; zeros if steps are unknown."""
    sums: dict[str, list[float]] = {"unrepeated": [0, 0.0, 0, 0], "repeated": [0, 0.0, 0, 0]}
    again, position = repeated(run.output.tokens[0]), 0
    for number, (gained, seconds) in enumerate(run.steps):
        kind = "repeated" if position < len(again) and again[position] else "unrepeated"
        for i, figure in enumerate((gained, seconds, gained if number else 0, 1 if number else 0)):
            sums[kind][i] += figure
        position += gained
    return sums


def repeated(tokens: Sequence[int], gram: int = GRAM) -> list[bool]:
    """For each token: do the `gram` tokens that end with it occur earlier in the same generated text?"""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(tokens) + 1):
        window = tuple(tokens[max(0, end - gram) : end])
        marks.append(window in seen)
        if len(window) == gram:
            seen.add(window)
    return marks
