"""The drafts that the planner chooses from: few and fixed, so that a step of each can be compiled once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from specheads.decoding.planner.by_cost.curves import StepCosts

CHAINS = (1, 2, 3, 4, 5, 7, 10)  # depths of the head's chains
COPIES = (*CHAINS, 15, 31)  # lengths of copies: they cost no drafting
COMPILED_CHAINS, COMPILED_COPIES = (2, 5), (5, 15, 31)  # fewer, since each is a graph that takes a while to compile
LARGEST = 1 + COPIES[-1]  # nodes of a step, root included
COMPILED_SIZES = tuple(sorted({1, *(1 + n for n in (*COMPILED_CHAINS, *COMPILED_COPIES))}))


@dataclass(frozen=True)
class Candidates:
    """chains: the depths of the head's; sizes: the node counts that a step may verify, ascending, from 1 on.

    own_size: a chain is verified only in steps of exactly its size, not in larger ones.
    """

    chains: tuple[int, ...]
    sizes: tuple[int, ...]
    own_size: bool = False
    _within: dict[Hashable, Candidates] = field(init=False, default_factory=dict, repr=False, compare=False)

    def within(self, nodes: int) -> Candidates:
        """The candidates of at most so many nodes."""
        if nodes >= self.sizes[-1]:
            return self
        if nodes not in self._within:
            chains = tuple(depth for depth in self.chains if depth < nodes)
            sizes = tuple(size for size in self.sizes if size <= nodes)
            self._within[nodes] = Candidates(chains, sizes, self.own_size)
        return self._within[nodes]


def make_candidates(
    costs: StepCosts, rows: int, depth: int, *, head: bool, compiled: bool = False, longest: int = 0
) -> Candidates:
    """The drafts worth having at these costs: those that pay if all of a draft is accepted.

    depth: the most tokens the head drafts. compiled: is each a graph? longest: tokens of the longest text that may
    come.
    """
    chains, copies = (COMPILED_CHAINS, COMPILED_COPIES) if compiled else (CHAINS, COPIES)

    def can_pay(drafted: int, drafts_head: bool) -> bool:
        """Does a step with so many drafts beat as many plain steps, at the start of a text or at its end?"""
        drafting = costs.draft_chain(rows, drafted, 1) if drafts_head else 0.0
        plain_steps = ((costs.step(rows, 1 + drafted, n) + drafting) / costs.step(rows, 1, n) for n in (0, longest))
        return min(plain_steps) < 1 + drafted

    depths = tuple(n for n in sorted({min(n, depth) for n in chains}) if can_pay(n, True)) if head else ()
    sizes = {1, *(1 + n for n in copies if can_pay(n, False)), *(1 + n for n in depths)}
    return Candidates(depths, tuple(sorted(sizes)), own_size=compiled)
