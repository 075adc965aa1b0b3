"""Which head, tree and depth would be fastest here: from recorded texts and measured costs, without decoding again.

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
from specheads.decoding.planner.by_cost.shapes import CHAINS, TREES, Shape
from specheads.losses.metrics import depths_reached
from specheads.models.calibration import calibrate_tree, measure_ranks
from specheads.models.spec_model import SpecModel

RANKS = 5  # of each depth that are counted
COPIES = (3, 5, 10, 15)


@dataclass(frozen=True)
class Candidate:
    """A way to draft. nodes: verified per row and step, root included; accepted_length: tokens per row and step; ms: of
    a step; batch: its rows."""

    drafter: str
    tree: str
    nodes: int
    accepted_length: float
    ms: float
    batch: int

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch * self.accepted_length / self.ms * 1e3


def recorded_ranks(model: SpecModel, record: Record) -> list[Tensor]:
    """Of each text the head's ranks (R, S) of its tokens after the first, which no draft precedes, in one forward pass
    of base and head. Texts that are no longer than the drafted depth are left out; ValueError if all are."""
    depth = model.head.scored_depths
    rows = [
        {"input_ids": [*prompt, *output], "labels": [*[-100] * (len(prompt) + 1), *output[1:]]}
        for prompt, output in record.outputs.items()
        if len(output) > depth
    ]
    if not rows:
        raise ValueError(f"no text of the record has more than the {depth} tokens of a draft; record longer ones")
    return [measure_ranks(model, [row]) for row in rows]


def length_by_steps(tree: StaticTree, texts: Sequence[Tensor]) -> float:
    """Accepted length of this static tree in decoding texts of these ranks: of each, steps that begin where the one
    before ended. A mean over all positions is higher where drafts come easily, as most of those begin no step."""
    tokens = steps = 0
    for ranks in texts:
        gains, position = (1 + depths_reached(tree, ranks)).tolist(), 0
        while position < len(gains):
            position += gains[position]
            steps += 1
        tokens += position
    return tokens / steps


def acceptance_of(ranks: Tensor) -> tuple[tuple[float, ...], ...]:
    """By depth and rank, the share of tokens of that rank where the likeliest drafts above were all right."""
    shares, right = [], torch.ones(len(ranks), dtype=torch.bool)
    for column in ranks.T:
        known = column[right]
        if not len(known):
            break
        shares.append(tuple((known == rank).float().mean().item() for rank in range(RANKS)))
        right = right & (column == 0)
    return tuple(shares)


def search_head(name: str, texts: Sequence[Tensor], costs: StepCosts, length: int) -> list[Candidate]:
    """The head's chains, and for each size the fastest tree counted on these texts, of ranks (R, S) each, after
    `length` tokens, in the batch that the costs were measured for."""
    ranks = torch.cat([*texts])
    depths = ranks.shape[1]
    found = [chain(n) for n in CHAINS if n <= depths]
    for nodes in TREES:
        trees = [calibrate_tree(ranks, nodes, depth) for depth in range(1, depths + 1)]
        best = max(trees, key=lambda tree: _candidate(name, tree, texts, costs, length).tokens_per_second)
        if best not in found:
            found.append(best)
    return [_candidate(name, tree, texts, costs, length) for tree in found]


def search_copies(record: Record, costs: StepCosts, length: int) -> list[Candidate]:
    """Plain decoding, and prompt lookup replayed over the record, in the batch that the costs were measured for."""
    batch = costs.batch
    found = [Candidate("none", "", 1, 1.0, costs.step(batch, 1, length), batch)]
    for count in COPIES:
        figures = review(record, record.outputs, PromptLookup(count), chain(count), torch.device("cpu"))
        ms = costs.step(batch, count + 1, length) + costs.lookup(length)
        found.append(Candidate("lookup", f"chain:{count}", count + 1, figures["accepted_length"], ms, batch))
    return found


def mean_length(record: Record) -> int:
    """Tokens of context at the middle of a recorded text."""
    return sum(len(prompt) + len(text) // 2 for prompt, text in record.outputs.items()) // len(record.outputs)


def _candidate(name: str, tree: StaticTree, texts: Sequence[Tensor], costs: StepCosts, length: int) -> Candidate:
    shape, batch = Shape(tree), costs.batch
    ms = costs.step(batch, shape.nodes, length) + costs.draft(batch, shape.levels, shape.depth + 1)
    text = f"chain:{shape.depth}" if shape.is_chain else f"calibrated, {shape.depth} deep"
    return Candidate(name, text, shape.nodes, length_by_steps(tree, texts), ms, batch)
