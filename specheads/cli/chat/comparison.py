"""Compares the decoders: the figures of each, and whether its text equals the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads.cli.chat.session import TARGET, Outcome

COLUMNS = ("", "tokens", "tokens/s", "speed-up", "accepted", "accepted length", "text", "distribution")


def compare_outcomes(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Decoder → its figures. speedup and same_text (token by token) are relative to the target alone, and None if that
    did not run; same_text also if either was stopped. acceptance_rate: accepted over drafted tokens, None if nothing
    was drafted."""
    target = next((outcome for outcome in outcomes if outcome.mode.name == TARGET), None)
    stopped = any(outcome.stopped for outcome in outcomes)
    base = target.statistics["tokens_per_second"] if target else 0
    return {
        outcome.mode.name: {
            "detail": outcome.mode.detail,
            **{key: outcome.statistics[key] for key in ("tokens", "steps", "drafted", "accepted", "seconds")},
            "tokens_per_second": outcome.statistics["tokens_per_second"],
            "speedup": outcome.statistics["tokens_per_second"] / base if base else None,
            "acceptance_rate": _share(outcome.statistics["accepted"], outcome.statistics["drafted"]),
            "accepted_length": outcome.statistics["accepted_length"],
            "same_text": None if target is None or stopped else outcome.token_ids == target.token_ids,
            "distribution": outcome.mode.distribution,
            "stopped": outcome.stopped,
        }
        for outcome in outcomes
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def cells(name: str, figures: dict[str, Any]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    rate, speedup, same = figures["acceptance_rate"], figures["speedup"], figures["same_text"]
    drafted = f"{figures['accepted']}/{figures['drafted']} ({rate:.0%})" if rate is not None else "–"
    text = "–" if same is None or name == TARGET else "same" if same else "differs"
    return [
        name + (" (stopped)" if figures["stopped"] else ""), str(figures["tokens"]),
        f"{figures['tokens_per_second']:.1f}", "–" if speedup is None else f"{speedup:.2f}×", drafted,
        f"{figures['accepted_length']:.2f}", text, figures["distribution"],
    ]  # fmt: skip
