"""Finds the head, tree and depth that would be fastest here from recorded texts and measured costs, without decoding.

Shapes: R scored positions, S drafted depths; ranks (R, S) as DraftHead.loss reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.drafters import PromptLookup
from specheads.decoding.generation.recorded import Record, review
from specheads.decoding.planner import StaticTree, chain
from specheads.decoding.planner.by_cost import StepCosts
from specheads.decoding.planner.by_cost.candidates import CHAINS
from specheads.losses.metrics import depths_reached
from specheads.losses.targets import ENDED
from specheads.models.calibration import calibrate_tree, measure_ranks
from specheads.models.spec_model import SpecModel

RANKS = 5  # ranks counted at each depth
COPIES = (3, 5, 10, 15)
TREES = (4, 8, 16, 32, 64)  # nodes, root included


@dataclass(frozen=True)
class Candidate:
    """A way to draft. nodes: verified per row and step, including the root; accepted_length: tokens per row and step;
    ms: milliseconds per step; batch: number of rows."""

    drafter: str
    tree: str
    nodes: int
    accepted_length: float
    ms: float
    batch: int

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch, not per row."""
        return self.batch * self.accepted_length / self.ms * 1e3


def recorded_ranks(model: SpecModel, record: Record) -> list[Tensor]:
    """For each text, the head's ranks (R, S) of its tokens after the first (which is never drafted), from one forward
    pass of base and head. Texts no longer than the drafted depth are skipped; ValueError if all are."""
    depth = model.head.scored_depths
    rows = [
        {"input_ids": [*prompt, *output], "labels": [*[-100] * len(prompt), *output]}
        for prompt, output in record.outputs.items()
        if len(output) > depth
    ]
    if not rows:
        raise ValueError(f"no text of the record has more than the {depth} tokens of a draft; record longer ones")
    return [measure_ranks(model, [row]) for row in rows]


def length_by_steps(tree: StaticTree, texts: Sequence[Tensor]) -> float:
    """Accepted length of this static tree when decoding texts with these ranks, each step starting where the one before
    ended. A mean over all positions would be too high: it counts easily drafted positions at which no step starts."""
    tokens = steps = 0
    for ranks in texts:
        gains, position = (1 + depths_reached(tree, ranks)).tolist(), 0
        while position < len(gains):
            position += gains[position]
            steps += 1
        tokens += position
    return tokens / steps


def acceptance_of(ranks: Tensor) -> tuple[tuple[float, ...], ...]:
    """By depth and rank, the share of tokens with that rank, where the top draft was right at every earlier depth."""
    shares, right = [], torch.ones(len(ranks), dtype=torch.bool)
    for column in ranks.T:
        known = column[right & (column != ENDED)]
        if not len(known):
            break
        shares.append(tuple((known == rank).float().mean().item() for rank in range(RANKS)))
        right = right & (column == 0)
    return tuple(shares)


def search_head(name: str, texts: Sequence[Tensor], costs: StepCosts, length: int) -> list[Candidate]:
    """The head's chains and, for each tree size, the fastest tree calibrated on these texts. texts: ranks (R, S) each;
    length: tokens of context. The batch is the one that the costs were measured for."""
    ranks = torch.cat([*texts])
    depths = ranks.shape[1]
    candidates = [chain(n) for n in CHAINS if n <= depths]
    for nodes in TREES:
        trees = [calibrate_tree(ranks, nodes, depth) for depth in range(1, depths + 1)]
        best = max(trees, key=lambda tree: _candidate(name, tree, texts, costs, length).tokens_per_second)
        if best not in candidates:
            candidates.append(best)
    return [_candidate(name, tree, texts, costs, length) for tree in candidates]


def search_copies(record: Record, costs: StepCosts, length: int) -> list[Candidate]:
    """Plain decoding, and prompt lookup replayed over the record, for the batch that the costs were measured for."""
    batch = costs.batch
    candidates = [Candidate("none", "", 1, 1.0, costs.step(batch, 1, length), batch)]
    for count in COPIES:
        figures = review(record, record.outputs, PromptLookup(count), chain(count), torch.device("cpu"))
        ms = costs.step(batch, count + 1, length) + costs.lookup(length)
        candidates.append(Candidate("lookup", f"chain:{count}", count + 1, figures["accepted_length"], ms, batch))
    return candidates


def mean_length(record: Record) -> int:
    """Mean number of context tokens at the middle of a recorded text."""
    return sum(len(prompt) + len(text) // 2 for prompt, text in record.outputs.items()) // len(record.outputs)


def _candidate(name: str, tree: StaticTree, texts: Sequence[Tensor], costs: StepCosts, length: int) -> Candidate:
    nodes, depth, batch = tree.num_nodes, tree.depth, costs.batch
    ms = costs.step(batch, nodes, length) + costs.draft(batch, tree.inner_nodes, depth + 1)
    text = f"chain:{depth}" if nodes == depth + 1 else f"calibrated, {depth} deep"
    return Candidate(name, text, nodes, length_by_steps(tree, texts), ms, batch)
