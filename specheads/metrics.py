"""How far drafts would have been accepted: joint accepted length and accuracy per depth, in sums that add exactly.

R scored positions, S drafted depths. ranks (R, S): rank of the base's own token in the draft of each depth, 0 where it
is the draft's first choice, −1 outside the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def accepted_length(ranks: Tensor) -> float:
    """1 + mean over positions of the leading run of first choices: tokens a pass of a drafted chain yields.

    The 1 is the base's own token behind the accepted ones. ValueError where there is no position.
    """
    meter = AcceptanceMeter()
    meter.add(ranks)
    return meter.compute()["accepted_length"]


@dataclass
class AcceptanceMeter:
    """Counts over ranks. Meters of batches, micro-batches or processes add up to the meter of all their positions.

    counts (1 + 2S,) int64, on the device of the ranks: positions; first choices at each depth; runs that reach past
    each depth. None before the first ranks.
    """

    counts: Tensor | None = None

    def add(self, ranks: Tensor | None) -> None:
        """Count ranks (R, S); None, from a batch too short to score, counts nothing. ValueError on another S."""
        if ranks is None:
            return
        if ranks.ndim != 2:
            raise ValueError(f"ranks have shape {tuple(ranks.shape)}: expected (positions, depths)")
        hits = ranks.detach() == 0
        runs = hits.long().cumprod(1)
        self._sum(torch.cat([hits.new_full((1,), len(hits), dtype=torch.long), hits.sum(0), runs.sum(0)]))

    def merge(self, other: AcceptanceMeter) -> None:
        if other.counts is not None:
            self._sum(other.counts)

    def _sum(self, counts: Tensor) -> None:
        if self.counts is None:
            self.counts = counts.clone()
        elif self.counts.shape != counts.shape:
            raise ValueError(
                f"ranks of {(len(counts) - 1) // 2} depths cannot be added to ranks of {(len(self.counts) - 1) // 2}"
            )
        else:
            self.counts = self.counts + counts.to(self.counts.device)

    def compute(self) -> dict[str, float]:
        """accepted_length; for each depth k = 1 … S accuracy_depth_k, the share of first choices, and
        conditional_accuracy_depth_k, that share where every depth before was a first choice (left out where none was).

        ValueError where nothing was counted.
        """
        positions, *rest = self.counts.tolist() if self.counts is not None else [0]
        if not positions:
            raise ValueError(
                "no position was scored: every sequence is shorter than the drafted depth, or unsupervised"
            )
        hits, runs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        result = {"accepted_length": 1 + sum(runs) / positions}
        result |= {f"accuracy_depth_{k}": hit / positions for k, hit in enumerate(hits, 1)}
        before = [positions, *runs]
        result |= {
            f"conditional_accuracy_depth_{k}": run / past
            for k, (run, past) in enumerate(zip(runs, before, strict=False), 1)
            if past
        }
        return result


@dataclass
class TrainingMeter:
    """What is reported between two logs: acceptance, and every loss term as a mean over supervised tokens."""

    acceptance: AcceptanceMeter = field(default_factory=AcceptanceMeter)
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None

    def add(self, ranks: Tensor | None, terms: dict[str, Tensor], num_items: Tensor | float, tokens: Tensor) -> None:
        """One batch: terms were divided by num_items; tokens () of this batch were supervised."""
        self.acceptance.add(ranks)
        for name, term in terms.items():
            # float64, so that the order of batches does not show
            summed = (term.detach() * num_items).double()
            self.sums[name] = self.sums[name] + summed if name in self.sums else summed
        self.tokens = tokens if self.tokens is None else self.tokens + tokens

    def state(self) -> dict[str, list[float]]:
        """Plain numbers, to be gathered from every process; one transfer from the device for each kind."""
        counts = self.acceptance.counts
        names = list(self.sums)
        values = torch.stack([self.sums[name] for name in names]).tolist() if names else []
        return {
            "counts": [] if counts is None else counts.tolist(),
            "tokens": [0 if self.tokens is None else int(self.tokens)],
            **{f"term {name}": [value] for name, value in zip(names, values, strict=True)},
        }

    @classmethod
    def of_state(cls, state: dict[str, list[float]], device: torch.device) -> TrainingMeter:
        """The meter whose `state()` that is."""
        counts = torch.tensor(state["counts"], dtype=torch.long, device=device) if state["counts"] else None
        terms = {key.removeprefix("term "): value[0] for key, value in state.items() if key.startswith("term ")}
        sums = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in terms.items()}
        return cls(AcceptanceMeter(counts), sums, torch.tensor(state["tokens"][0], device=device))

    @staticmethod
    def combined(states: list[dict[str, list[float]]]) -> dict[str, float]:
        """The report over the states of all processes; without acceptance where no position was scored."""
        acceptance = AcceptanceMeter()
        sums: dict[str, float] = {}
        tokens = 0.0
        for state in states:
            if state["counts"]:
                acceptance.merge(AcceptanceMeter(torch.tensor(state["counts"], dtype=torch.long)))
            tokens += state["tokens"][0]
            for key in sorted(state.keys() - {"counts", "tokens"}):
                name = key.removeprefix("term ")
                sums[name] = sums.get(name, 0.0) + state[key][0]
        scored = acceptance.counts is not None and bool(acceptance.counts[0])
        return {**(acceptance.compute() if scored else {}), **{k: v / max(tokens, 1) for k, v in sums.items()}}
