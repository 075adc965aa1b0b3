"""How many draft tokens would have been accepted: accepted length and accuracy per depth, from sums that merge exactly.

R starts of decoding steps, S drafted depths. ranks (R, S): the rank of the base's own token in the draft of each depth,
0 if it is the draft's first choice, −1 outside the draft vocabulary, ENDED from the answer's last token on: the step
gains that one in any case, and nothing after it. overlaps (R, S): α = Σ min(p, q), the probability that the exact rule
accepts a token sampled from the draft; not read where ranks are ENDED.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.decoding.planner import StaticTree
from specheads.decoding.results import RANGES
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


Sums = dict[str, Tensor]  # each (1,) or (S,), float64, in which counts are exact


def add_sums(sums: Sums, more: Mapping[str, Tensor]) -> None:
    """Add to sums in place. ValueError if they are of another number of depths."""
    for name, value in more.items():
        value = value.detach().double().reshape(-1)
        if name in sums:
            if sums[name].shape != value.shape:
                raise ValueError(
                    f"ranks of {len(value)} depths cannot be added to ranks of {len(sums[name])}, in the sum {name!r}"
                )
            value = sums[name] + value.to(sums[name].device)
        sums[name] = value


@dataclass
class AcceptanceMeter:
    """Sums over ranks. Meters of batches, micro-batches or processes add up to the meter of all their positions.

    tree: a static tree to count for, too.
    sums: starts; in_tree, the tree's accepted tokens; and at each depth: drafts, hits (first choices), reached (drafts
      after a run of first choices), runs (that include it). Of the starts with overlaps: measured, their number; and at
      each depth: measured_drafts, alphas, products of the alphas up to it. moments: how many batches; Σ s², Σ s·n and
      Σ n² over them, for s accepted tokens at n starts. range_starts and range_runs, by RANGES of output positions:
      starts, and tokens of runs.
    """

    tree: StaticTree | None = None
    sums: Sums = field(default_factory=dict)

    def add(self, ranks: Tensor | None, overlaps: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Count ranks and overlaps (R, S). None, from a batch too short to score: ignored. ValueError if S changes.

        positions (R,): of the starts in the output, by `targets.tokens_before`."""
        if ranks is None:
            return
        if ranks.ndim != 2:
            raise ValueError(f"ranks have shape {tuple(ranks.shape)}: expected (positions, depths)")
        drafted, hits = ranks.detach() != ENDED, ranks.detach() == 0
        runs = hits.long().cumprod(1)
        reached = torch.cat([torch.ones_like(runs[:, :1]), runs[:, :-1]], 1) * drafted
        one = torch.ones(len(ranks), 1, device=ranks.device)
        rows = {"starts": one, "drafts": drafted, "hits": hits, "reached": reached, "runs": runs}
        if self.tree is not None:
            rows["in_tree"] = depths_reached(self.tree, ranks)
        if overlaps is not None:
            alphas = torch.where(drafted, overlaps.detach().double(), 0)
            rows |= {"measured": one, "measured_drafts": drafted, "alphas": alphas, "products": alphas.cumprod(1)}
        totals = {name: values.double().sum(0) for name, values in rows.items()}
        if positions is not None:
            index = torch.bucketize(positions, positions.new_tensor(RANGES[1:]), right=True)
            empty = torch.zeros(len(RANGES), dtype=torch.float64, device=index.device)
            totals["range_starts"] = empty.index_add(0, index, one.double().squeeze(1))
            totals["range_runs"] = empty.index_add(0, index, runs.sum(1).double())
        accepted, starts = totals["runs"].sum(), totals["starts"].sum()
        totals["moments"] = torch.stack(
            [(starts > 0).double(), accepted * accepted, accepted * starts, starts * starts]
        )
        add_sums(self.sums, totals)

    def merge(self, other: AcceptanceMeter) -> None:
        add_sums(self.sums, other.sums)

    def error(self) -> float | None:
        """The standard error of the accepted length, from the variation between batches, since neighbouring positions
        are correlated: that of a ratio of two sums over batches (linearised). None for fewer than two batches."""
        if "moments" not in self.sums:
            return None
        starts, (number, squares, products, sizes) = float(self.sums["starts"]), self.sums["moments"].tolist()
        if number < 2 or not starts:
            return None
        mean = float(self.sums["runs"].sum()) / starts
        spread = max(0.0, squares - 2 * mean * products + mean * mean * sizes)
        return math.sqrt(spread * number / (number - 1)) / starts

    def compute(self) -> dict[str, float]:
        """The metrics by name, for depths k = 1 … S, those left out of which nothing was counted:

        accepted_length: of a greedy chain. accepted_length_error: its standard error, with two batches or more.
        accepted_length_from_P: of starts in the range of output positions that begins at P, if several were reached.
        accuracy_depth_k: the share of first choices. conditional_accuracy_depth_k: that share among starts where every
          earlier depth was a first choice.
        accepted_length_tree: of the tree, if it has at most S depths.
        acceptance_depth_k: the mean α, if overlaps were counted. accepted_length_sampled: of a chain sampled at
          temperature 1, for texts that the base itself would write.

        ValueError if nothing was counted.
        """
        sums = {name: values.tolist() for name, values in self.sums.items()}
        starts, measured = (sums.get(name, [0])[0] for name in ("starts", "measured"))
        if not starts:
            raise ValueError(
                "no position was scored: a decoding step starts at a token to learn that is followed by another one"
            )
        result = {"accepted_length": 1 + sum(sums["runs"]) / starts}
        if (error := self.error()) is not None:
            result["accepted_length_error"] = error
        ranges = list(zip(RANGES, sums.get("range_starts", []), sums.get("range_runs", []), strict=False))
        if sum(count > 0 for _, count, _ in ranges) > 1:
            result |= {f"accepted_length_from_{at}": 1 + runs / count for at, count, runs in ranges if count}
        if self.tree is not None and self.tree.depth <= len(sums["hits"]):
            result["accepted_length_tree"] = 1 + sum(sums["in_tree"]) / starts
        shares = [("accuracy", "hits", "drafts"), ("conditional_accuracy", "runs", "reached")]
        if measured:
            result["accepted_length_sampled"] = 1 + sum(sums["products"]) / measured
            shares.append(("acceptance", "alphas", "measured_drafts"))
        for name, part, whole in shares:
            pairs = enumerate(zip(sums[part], sums[whole], strict=True), 1)
            result |= {f"{name}_depth_{k}": some / every for k, (some, every) in pairs if every}
        return result


@dataclass
class TrainingMeter:
    """What training counts between two logs: acceptance, and every loss term as a mean over supervised tokens.

    sums: "tokens", supervised ones, and "term NAME" for each loss term."""

    acceptance: AcceptanceMeter = field(default_factory=AcceptanceMeter)
    sums: Sums = field(default_factory=dict)

    def add(
        self, ranks: Tensor | None, terms: dict[str, Tensor], num_items: Tensor | float, tokens: Tensor,
        overlaps: Tensor | None = None, positions: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add one batch. terms: already divided by num_items. tokens (): the batch's number of supervised tokens."""
        self.acceptance.add(ranks, overlaps, positions)
        add_sums(self.sums, {"tokens": tokens, **{f"term {name}": term * num_items for name, term in terms.items()}})

    def state(self) -> dict[str, list[float]]:
        """The sums as plain numbers, to gather from every process."""
        return {name: values.tolist() for name, values in (self.acceptance.sums | self.sums).items()}

    @classmethod
    def of_states(cls, states: list[dict[str, list[float]]], device: torch.device) -> TrainingMeter:
        """The meter that adds up the meters with these `state()`s."""
        meter = cls()
        for state in states:
            for name, values in state.items():
                sums = meter.sums if name == "tokens" or name.startswith("term ") else meter.acceptance.sums
                add_sums(sums, {name: torch.tensor(values, dtype=torch.float64, device=device)})
        return meter

    @staticmethod
    def combined(states: list[dict[str, list[float]]], tree: StaticTree | None = None) -> dict[str, float]:
        """The metrics over the states of all processes, whose meters counted for `tree`; without acceptance if no
        position was scored."""
        meter = TrainingMeter.of_states(states, torch.device("cpu"))
        meter.acceptance.tree = tree
        sums = {name: float(values) for name, values in sorted(meter.sums.items())}
        tokens = sums.pop("tokens", 0)
        terms = {name.removeprefix("term "): value / max(tokens, 1) for name, value in sums.items()}
        return {**(meter.acceptance.compute() if meter.acceptance.sums.get("starts") else {}), **terms}
