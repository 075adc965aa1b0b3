"""How many draft tokens would have been accepted: accepted length and accuracy per depth, from sums that merge exactly.

R starts of decoding steps, S drafted depths. ranks (R, S): the rank of the base's own token in the draft of each depth,
0 if it is the draft's first choice, −1 outside the draft vocabulary, ENDED from the answer's last token on: the step
gains that one in any case, and nothing after it. overlaps (R, S): α = Σ min(p, q), the probability that the exact rule
accepts a token sampled from the draft; not read where ranks are ENDED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.decoding.planner import StaticTree
from specheads.losses.targets import ENDED


def accepted_length(ranks: Tensor) -> float:
    """1 + the mean length of the leading run of first choices: the tokens that one pass over a drafted chain yields.

    The 1 is the base's own token after the accepted ones, or the answer's last. ValueError if there is no start.
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

    tree: a static tree to count for, too. counts (2 + 4S,) int64, on the device of the ranks: starts; accepted tokens
    of the tree; and at each depth: drafts, first choices, drafts after a run of first choices, runs that include it.
    chances (1 + 3S,) float64: starts with overlaps; and at each depth: drafts, Σ α, Σ of the products of α up to it.
    batches (4,) float64: how many batches; Σ s², Σ s·n and Σ n² over them, for s accepted tokens at n starts. None
    before the first ranks or overlaps.
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
        drafted, hits = ranks.detach() != ENDED, ranks.detach() == 0
        runs = hits.long().cumprod(1)
        reached = torch.cat([torch.ones_like(runs[:, :1]), runs[:, :-1]], 1) * drafted
        in_tree = hits.new_zeros(1, dtype=torch.long)
        if self.tree is not None:
            in_tree += depths_reached(self.tree, ranks).sum()
        by_depth = [part.sum(0) for part in (drafted, hits, reached, runs)]
        self.counts = _sum(self.counts, torch.cat([_rows(hits, torch.long), in_tree, *by_depth]))
        accepted, starts = runs.sum().double(), _rows(runs, torch.float64)[0]
        moments = [(starts > 0).double(), accepted * accepted, accepted * starts, starts * starts]
        self.batches = _sum(self.batches, torch.stack(moments))
        if overlaps is not None:
            alphas = torch.where(drafted, overlaps.detach().double(), 0)
            by_depth = [part.sum(0) for part in (drafted.double(), alphas, alphas.cumprod(1))]
            self.chances = _sum(self.chances, torch.cat([_rows(alphas, torch.float64), *by_depth]))

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
        (starts, _), (*_, runs) = _split(self.counts, 2, 4)
        number, squares, products, sizes = self.batches.tolist()
        if number < 2 or not starts:
            return None
        mean = sum(runs) / starts
        spread = max(0.0, squares - 2 * mean * products + mean * mean * sizes)
        return math.sqrt(spread * number / (number - 1)) / starts

    def compute(self) -> dict[str, float]:
        """The metrics by name, for depths k = 1 … S, those left out of which nothing was counted:

        accepted_length: of a greedy chain. accepted_length_error: its standard error, with two batches or more.
        accuracy_depth_k: the share of first choices. conditional_accuracy_depth_k: that share among starts where every
          earlier depth was a first choice.
        accepted_length_tree: of the tree, if it has at most S depths.
        acceptance_depth_k: the mean α, if overlaps were counted. accepted_length_sampled: of a chain sampled at
          temperature 1, for texts that the base itself would write.

        ValueError if nothing was counted.
        """
        if self.counts is None or not self.counts[0]:
            raise ValueError(
                "no position was scored: a decoding step starts at a token to learn that is followed by another one"
            )
        (starts, in_tree), (drafts, hits, reached, runs) = _split(self.counts, 2, 4)
        result = {"accepted_length": 1 + sum(runs) / starts}
        if (error := self.error()) is not None:
            result["accepted_length_error"] = error
        if self.tree is not None and self.tree.depth <= len(hits):
            result["accepted_length_tree"] = 1 + in_tree / starts
        result |= _shares("accuracy", hits, drafts) | _shares("conditional_accuracy", runs, reached)
        if self.chances is not None and self.chances[0]:
            (measured,), (drafts, alphas, products) = _split(self.chances, 1, 3)
            result["accepted_length_sampled"] = 1 + sum(products) / measured
            result |= _shares("acceptance", alphas, drafts)
        return result


def _split(sums: Tensor, singles: int, kinds: int) -> tuple[list[float], list[list[float]]]:
    """The sums that are one number, and those of each kind by depth."""
    return sums[:singles].tolist(), sums[singles:].view(kinds, -1).tolist()


def _shares(name: str, parts: Sequence[float], wholes: Sequence[float]) -> dict[str, float]:
    pairs = enumerate(zip(parts, wholes, strict=True), 1)
    return {f"{name}_depth_{k}": part / whole for k, (part, whole) in pairs if whole}


def _rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), len(values), dtype=dtype, device=values.device)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    if total is None:
        return more.clone()
    if total.shape != more.shape:
        raise ValueError(f"ranks of {(len(more) - 2) // 4} depths cannot be added to ranks of {(len(total) - 2) // 4}")
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
            "accepted": [] if counts is None else counts.tolist(),
            "overlaps": [] if chances is None else chances.tolist(),
            "moments": [] if self.acceptance.batches is None else self.acceptance.batches.tolist(),
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
    # Absent from a checkpoint of an older version, which counted otherwise.
    counts, chances, batches = (state.get(name) for name in ("accepted", "overlaps", "moments"))
    return AcceptanceMeter(
        counts=torch.tensor(counts, dtype=torch.long, device=device) if counts else None,
        chances=torch.tensor(chances, dtype=torch.float64, device=device) if chances else None,
        batches=torch.tensor(batches, dtype=torch.float64, device=device) if batches else None,
    )
