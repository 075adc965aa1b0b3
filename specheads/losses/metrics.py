"""How many draft tokens would have been accepted: accepted length and accuracy per depth, from sums that merge exactly.

R positions where drafts started, S drafted depths. ranks (R, S): the rank of the base's own token in the draft of each
depth, 0 if it is the draft's first choice, −1 outside the draft vocabulary. overlaps (R, S): α = Σ min(p, q), the
probability that the exact rule accepts a token sampled from the draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.decoding.planner import StaticTree


def accepted_length(ranks: Tensor) -> float:
    """1 + the mean length of the leading run of first choices: the tokens that one pass over a drafted chain yields.

    The 1 is the base's own token after the accepted ones. ValueError if there is no position.
    """
    meter = AcceptanceMeter()
    meter.add(ranks)
    return meter.compute()["accepted_length"]


def depths_reached(tree: StaticTree, ranks: Tensor) -> Tensor:
    """(R,) how many tokens of a static tree are accepted greedily, given the ranks (R, S) of the base's own tokens."""
    choices = ((), *tree.choices)
    index = {choice: i for i, choice in enumerate(choices)}
    width = 1 + max(choice[-1] for choice in tree.choices)
    # children[i, r]: child r of node i, or −1. The last row, all −1, is for node −1.
    children = torch.tensor([[index.get((*choice, r), -1) for r in range(width)] + [-1] for choice in choices])
    children = torch.cat([children, torch.full_like(children[:1], -1)]).to(ranks.device)
    bounded = torch.where((ranks < 0) | (ranks >= width), width, ranks)
    node = torch.zeros(len(ranks), dtype=torch.long, device=ranks.device)
    reached = torch.zeros_like(node)
    for rank in bounded.unbind(1):
        node = children[node, rank]
        reached += node >= 0
    return reached


@dataclass
class AcceptanceMeter:
    """Counts over ranks. Meters of batches, micro-batches or processes add up to the meter of all their positions.

    tree: a static tree to count for, too. counts (2 + 2S,) int64, on the device of the ranks: positions; first choices
    at each depth; leading runs that include each depth; accepted tokens of the tree. chances (1 + 2S,) float64:
    positions with overlaps; Σ α at each depth; Σ of the products of α up to each depth. batches (4,) float64: how many
    batches; Σ s², Σ s·n and Σ n² over them, for s accepted tokens at n positions. None before the first ranks or
    overlaps.
    """

    tree: StaticTree | None = None
    counts: Tensor | None = None
    chances: Tensor | None = None
    batches: Tensor | None = None

    def add(self, ranks: Tensor | None, overlaps: Tensor | None = None) -> None:
        """Count ranks and overlaps (R, S). None, from a batch too short to score: ignored. ValueError if S changes."""
        if ranks is None:
            return
        if ranks.ndim != 2:
            raise ValueError(f"ranks have shape {tuple(ranks.shape)}: expected (positions, depths)")
        hits = ranks.detach() == 0
        runs = hits.long().cumprod(1)
        in_tree = hits.new_zeros(1, dtype=torch.long)
        if self.tree is not None:
            in_tree += depths_reached(self.tree, ranks).sum()
        self.counts = _sum(self.counts, torch.cat([_rows(hits, torch.long), hits.sum(0), runs.sum(0), in_tree]))
        accepted, scored = runs.sum().double(), _rows(runs, torch.float64)[0]
        moments = [(scored > 0).double(), accepted * accepted, accepted * scored, scored * scored]
        self.batches = _sum(self.batches, torch.stack(moments))
        if overlaps is not None:
            alphas = overlaps.detach().double()
            chances = torch.cat([_rows(alphas, torch.float64), alphas.sum(0), alphas.cumprod(1).sum(0)])
            self.chances = _sum(self.chances, chances)

    def merge(self, other: AcceptanceMeter) -> None:
        if other.counts is not None:
            self.counts = _sum(self.counts, other.counts)
        if other.chances is not None:
            self.chances = _sum(self.chances, other.chances)
        if other.batches is not None:
            self.batches = _sum(self.batches, other.batches)

    def error(self) -> float | None:
        """The standard error of the accepted length, from the variation between batches, since neighbouring positions
        are correlated: that of a ratio of two sums over batches (linearised). None for fewer than two batches."""
        if self.counts is None or self.batches is None:
            return None
        positions, *rest, _ = self.counts.tolist()
        number, squares, products, sizes = self.batches.tolist()
        if number < 2 or not positions:
            return None
        mean = sum(rest[len(rest) // 2 :]) / positions
        spread = max(0.0, squares - 2 * mean * products + mean * mean * sizes)
        return math.sqrt(spread * number / (number - 1)) / positions

    def compute(self) -> dict[str, float]:
        """The metrics by name, for depths k = 1 … S:

        accepted_length: of a greedy chain. accepted_length_error: its standard error, with two batches or more.
        accuracy_depth_k: the share of first choices. conditional_accuracy_depth_k: that share among positions where
          every earlier depth was a first choice; left out if there are none.
        accepted_length_tree: of the tree, if it has at most S depths.
        acceptance_depth_k: the mean α, if overlaps were counted. accepted_length_sampled: of a chain sampled at
          temperature 1, for texts that the base itself would write.

        ValueError if nothing was counted.
        """
        positions, *rest, in_tree = self.counts.tolist() if self.counts is not None else [0, 0]
        if not positions:
            raise ValueError(
                "no position was scored: every sequence is shorter than the drafted depth, or unsupervised"
            )
        hits, runs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        result = {"accepted_length": 1 + sum(runs) / positions}
        if (error := self.error()) is not None:
            result["accepted_length_error"] = error
        if self.tree is not None and self.tree.depth <= len(hits):
            result["accepted_length_tree"] = 1 + in_tree / positions
        result |= {f"accuracy_depth_{k}": hit / positions for k, hit in enumerate(hits, 1)}
        before = [positions, *runs]
        result |= {
            f"conditional_accuracy_depth_{k}": run / past
            for k, (run, past) in enumerate(zip(runs, before, strict=False), 1)
            if past
        }
        if self.chances is not None and self.chances[0]:
            measured, *chances = self.chances.tolist()
            alphas, products = chances[: len(chances) // 2], chances[len(chances) // 2 :]
            result["accepted_length_sampled"] = 1 + sum(products) / measured
            result |= {f"acceptance_depth_{k}": alpha / measured for k, alpha in enumerate(alphas, 1)}
        return result


def _rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), len(values), dtype=dtype, device=values.device)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    if total is None:
        return more.clone()
    if total.shape != more.shape:
        raise ValueError(f"ranks of {(len(more) - 1) // 2} depths cannot be added to ranks of {(len(total) - 1) // 2}")
    return total + more.to(total.device)


@dataclass
class TrainingMeter:
    """What training counts between two logs: acceptance, and every loss term as a mean over supervised tokens."""

    acceptance: AcceptanceMeter = field(default_factory=AcceptanceMeter)
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: Tensor | None = None

    def add(
        self, ranks: Tensor | None, terms: dict[str, Tensor], num_items: Tensor | float, tokens: Tensor,
        overlaps: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add one batch. terms: already divided by num_items. tokens (): the batch's number of supervised tokens."""
        self.acceptance.add(ranks, overlaps)
        for name, term in terms.items():
            # float64, so that the order of batches makes no difference
            summed = (term.detach() * num_items).double()
            self.sums[name] = self.sums[name] + summed if name in self.sums else summed
        self.tokens = tokens if self.tokens is None else self.tokens + tokens

    def state(self) -> dict[str, list[float]]:
        """The sums as plain numbers, to gather from every process; one transfer from the device per kind."""
        counts, chances = self.acceptance.counts, self.acceptance.chances
        names = list(self.sums)
        values = torch.stack([self.sums[name] for name in names]).tolist() if names else []
        return {
            "counts": [] if counts is None else counts.tolist(),
            "chances": [] if chances is None else chances.tolist(),
            "batches": [] if self.acceptance.batches is None else self.acceptance.batches.tolist(),
            "tokens": [0 if self.tokens is None else int(self.tokens)],
            **{f"term {name}": [value] for name, value in zip(names, values, strict=True)},
        }

    @classmethod
    def of_states(cls, states: list[dict[str, list[float]]], device: torch.device) -> TrainingMeter:
        """The meter that adds up the meters with these `state()`s."""
        meter = cls()
        for state in states:
            meter.acceptance.merge(_acceptance(state, device))
            tokens = torch.tensor(state["tokens"][0], device=device)
            meter.tokens = tokens if meter.tokens is None else meter.tokens + tokens
            for key in (key for key in state if key.startswith("term ")):
                name, more = key.removeprefix("term "), torch.tensor(state[key][0], dtype=torch.float64, device=device)
                meter.sums[name] = meter.sums[name] + more if name in meter.sums else more
        return meter

    @staticmethod
    def combined(states: list[dict[str, list[float]]], tree: StaticTree | None = None) -> dict[str, float]:
        """The metrics over the states of all processes, whose meters counted for `tree`; without acceptance if no
        position was scored."""
        meter = TrainingMeter.of_states(states, torch.device("cpu"))
        acceptance, tokens = meter.acceptance, 0 if meter.tokens is None else int(meter.tokens)
        acceptance.tree = tree
        scored = acceptance.counts is not None and bool(acceptance.counts[0])
        terms = {name: float(meter.sums[name]) / max(tokens, 1) for name in sorted(meter.sums)}
        return {**(acceptance.compute() if scored else {}), **terms}


def _acceptance(state: dict[str, list[float]], device: torch.device) -> AcceptanceMeter:
    counts, chances, batches = state["counts"], state["chances"], state.get("batches")  # older states have none
    return AcceptanceMeter(
        counts=torch.tensor(counts, dtype=torch.long, device=device) if counts else None,
        chances=torch.tensor(chances, dtype=torch.float64, device=device) if chances else None,
        batches=torch.tensor(batches, dtype=torch.float64, device=device) if batches else None,
    )
