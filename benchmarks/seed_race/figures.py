"""The figures of benchmarks/seeds.py: ratios inside a repeat, their intervals, and the table."""

from __future__ import annotations

import random
from statistics import mean, median
from typing import Any

from seed_race.settings import Race
from specheads.bench import report

Answers = list[list[dict[str, Any]]]  # by repeat, by prompt: theirs.answer()'s
DRAWS = 1000
COLUMNS = (
    "system", "setting", "its cache", "new tokens", "tokens/s: theirs", "ours", "ours by theirs", "by wall time",
    "greedy text: theirs", "ours", "acceptance: theirs", "ours", "passes a token: theirs", "ours",
)  # fmt: skip
# What stands in for things that an original needs and does not bring, and what its code does that the table shows.
NOTES = {
    "romsto": "romsto's greedy mode accepts a draft by p/q of the whole distributions: another text than the target's. "
    "With its cache on it gives the model all tokens again after those in the cache.",
    "cs-drafting": "CS Drafting loads a tokenizer from a hub as it is imported, and never uses it: none is loaded. Its "
    "n-gram model has 32,000 tokens whatever the target has: set to the target's. Its last step overshoots.",
    "fsd": "FSD imports a class that transformers 4.44.2 lacks, and never uses it: None stands there. It drafts "
    "the likeliest tokens and judges them as if they were drawn, so that sampled text is accepted more often than the "
    "target's distribution allows. Under a threshold it samples wherever a draft is rejected, in greedy mode too.",
    "notebook": "The notebook has no repository: its published algorithm was written anew. Its last step overshoots.",
    "modelopt": "ModelOpt's EAGLE-3 has no norm_before_residual: where the head has it, a hook before its block norms.",
}


def speeds(answers: Answers, clock: str) -> list[float]:
    """Tokens a second of each repeat, over all prompts."""
    return [sum(len(a["ids"]) for a in row) / sum(a[clock] for a in row) for row in answers]


def ratio(ours: Answers, theirs: Answers, clock: str) -> float:
    """The median over repeats of our speed by theirs in the same repeat."""
    return median(a / b for a, b in zip(speeds(ours, clock), speeds(theirs, clock), strict=True))


def interval(ours: Answers, theirs: Answers, clock: str, draws: int = DRAWS) -> tuple[float, float]:
    """Where 95 % of ratio() lie, when repeats and prompts are drawn again with replacement: a bootstrap of both."""
    dice = random.Random(0)
    repeats, prompts = range(len(ours)), range(len(ours[0]))
    found = []
    for _ in range(draws):
        rows, columns = dice.choices(repeats, k=len(repeats)), dice.choices(prompts, k=len(prompts))
        a, b = ([[side[r][p] for p in columns] for r in rows] for side in (ours, theirs))
        found.append(ratio(a, b, clock))
    found.sort()
    return found[round(0.025 * (draws - 1))], found[round(0.975 * (draws - 1))]


def same_texts(answers: Answers, own: list[list[int]]) -> int:
    """On how many prompts the text begins, in every repeat, with the target's own."""
    return sum(all(row[i]["ids"][: len(text)] == text for row in answers) for i, text in enumerate(own))


def record(
    race: Race, cache: bool, theirs: Answers, ours: Answers, their_own: dict[str, Any], our_own: dict[str, Any]
) -> dict[str, Any]:
    """All figures of one race against one way of calling the original, as plain values."""
    sides = {"theirs": (theirs, their_own), "ours": (ours, our_own)}

    def of_both(figure: Any) -> dict[str, Any]:
        return {name: figure(answers, own) for name, (answers, own) in sides.items()}

    def acceptance(answers: Answers, own: Any) -> float | None:
        known = [a["acceptance"] for row in answers for a in row if a["acceptance"] is not None]
        return mean(known) if known else None

    def passes(answers: Answers, own: Any) -> float:
        every = [a for row in answers for a in row]
        return sum(a["passes"] for a in every) / sum(len(a["ids"]) for a in every)

    made: dict[str, Any] = {
        "system": race.system, "setting": race.name, "called_with": race.setting | {"cache": cache},
        "versions": their_own["versions"], "prompts": len(ours[0]), "repeats": len(ours),
        "new_tokens": of_both(lambda answers, own: mean(len(a["ids"]) for row in answers for a in row)),
        "own_texts_alike": sum(a == b for a, b in zip(their_own["greedy"], our_own["greedy"], strict=True)),
        "same_texts": of_both(lambda answers, own: same_texts(answers, own["greedy"])) if race.exact else None,
        "acceptance": of_both(acceptance), "passes_per_token": of_both(passes),
    }  # fmt: skip
    for clock in ("cpu_seconds", "wall_seconds"):
        made[clock] = {
            "tokens_per_second": of_both(lambda answers, own, clock=clock: median(speeds(answers, clock))),
            "ours_by_theirs": ratio(ours, theirs, clock), "interval": interval(ours, theirs, clock),
        }  # fmt: skip
    return made


def wrong(records: list[dict[str, Any]]) -> list[str]:
    """The races in which a greedy text of ours is not the target's own."""
    return [
        f"{r['system']}, {r['setting']}: {r['same_texts']['ours']} of {r['prompts']}"
        for r in records
        if r["same_texts"] and r["same_texts"]["ours"] < r["prompts"]
    ]


def table(records: list[dict[str, Any]]) -> str:
    rows = []
    for r in records:
        cpu, wall = r["cpu_seconds"], r["wall_seconds"]
        texts = {s: f"{r['same_texts'][s]} of {r['prompts']}" if r["same_texts"] else "–" for s in ("theirs", "ours")}
        accepted = {s: "–" if r["acceptance"][s] is None else f"{r['acceptance'][s]:.2f}" for s in ("theirs", "ours")}
        low, high = cpu["interval"]
        rows.append([
            r["system"], r["setting"], "on" if r["called_with"]["cache"] else "–", f"{r['new_tokens']['theirs']:.1f}",
            f"{cpu['tokens_per_second']['theirs']:.1f}", f"{cpu['tokens_per_second']['ours']:.1f}",
            f"{cpu['ours_by_theirs']:.2f}× ({low:.2f}–{high:.2f})", f"{wall['ours_by_theirs']:.2f}×",
            texts["theirs"], texts["ours"], accepted["theirs"], accepted["ours"],
            f"{r['passes_per_token']['theirs']:.2f}", f"{r['passes_per_token']['ours']:.2f}",
        ])  # fmt: skip
    return report.markdown(COLUMNS, rows)
