"""The shapes that the planner chooses from: few and fixed, so that a step of each can be compiled once.

Shapes: B batch rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from specheads.decoding.cached import cached_property
from specheads.decoding.planner.by_cost.curves import StepCosts
from specheads.decoding.planner.by_cost.estimates import HeadEstimate
from specheads.decoding.planner.static import StaticTree, chain, likeliest_tree

CHAINS = (1, 2, 3, 4, 5, 7, 10)
COPIES = (*CHAINS, 15, 31)  # lengths of copies: they cost no drafting
TREES = (4, 8, 16, 32, 64)  # nodes, root included
COMPILED_CHAINS, COMPILED_COPIES = (2, 5), (5, 15, 31)
LARGEST = max(*TREES, *(1 + n for n in COPIES))
COMPILED_SIZES = tuple(sorted({1, *TREES, *(1 + n for n in (*COMPILED_CHAINS, *COMPILED_COPIES))}))
WORTH = 4.0  # trees of the head that take longer than so many plain steps are left out
CAUTION = 0.08  # how much faster than no draft, as a share, a draft must promise to be: costs and chances are estimates


@dataclass(frozen=True)
class Shape:
    """A static tree of the head, and the numbers that its cost and its gain depend on."""

    tree: StaticTree

    @cached_property
    def nodes(self) -> int:
        return self.tree.num_nodes

    @cached_property
    def depth(self) -> int:
        return self.tree.depth

    @cached_property
    def is_chain(self) -> bool:
        return self.nodes == self.depth + 1

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """How many nodes of each level below the root are expanded."""
        inner = Counter(len(above) for above in {choice[:-1] for choice in self.tree.choices} if above)
        return tuple(inner[depth] for depth in range(1, self.depth))

    @cached_property
    def children(self) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        """Choice → its child choices in drafting order, for those that have any; () is the root."""
        children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for choice in self.tree.choices:
            children.setdefault(choice[:-1], []).append(choice)
        return children

    def gain(self, row: HeadEstimate) -> float:
        """The expected accepted tokens."""
        return row.chain_gains[self.depth] if self.is_chain else row.tree_gain(self.tree.choices)


@dataclass(frozen=True)
class Menu:
    """shapes: the head's, chains first; sizes: the node counts that a step may verify, ascending, from 1 on.

    own_size: the head's shapes are verified only in steps of exactly their size, not in larger ones.
    """

    shapes: tuple[Shape, ...]
    sizes: tuple[int, ...]
    own_size: bool = False
    _within: dict[Hashable, Menu] = field(init=False, default_factory=dict, repr=False, compare=False)

    def fits(self, shape: Shape | None, size: int) -> bool:
        """May a step of this size verify the shape?"""
        if shape is None:
            return True
        return size == shape.nodes if self.own_size else size >= shape.nodes

    @cached_property
    def depth(self) -> int:
        """The deepest shape's depth."""
        return max((shape.depth for shape in self.shapes), default=0)

    @property
    def drafting_slots(self) -> int:
        """What the largest shape needs in the head's cache, see `Plan.drafting_slots`."""
        return max((max(s.depth + 1, s.tree.drafting_slots) for s in self.shapes), default=0)

    def within(self, nodes: int, depth: int) -> Menu:
        """The part of the menu within these limits."""
        if nodes >= self.sizes[-1] and depth >= self.depth:
            return self
        shapes = tuple(i for i, shape in enumerate(self.shapes) if shape.nodes <= nodes and shape.depth <= depth)
        sizes = tuple(size for size in self.sizes if size <= nodes)
        if (shapes, sizes) not in self._within:
            fitting = tuple(self.shapes[i] for i in shapes)
            self._within[shapes, sizes] = replace(self, shapes=fitting, sizes=sizes)
        return self._within[shapes, sizes]


def make_menu(
    costs: StepCosts,
    rows: int,
    acceptance: Sequence[Sequence[float]],
    depth: int,
    *,
    head: bool,
    compiled: bool = False,
    branching: bool = True,
    longest: int = 0,
) -> Menu:
    """The shapes worth having at these costs: those that pay if all of a draft is accepted.

    depth: the most levels the head drafts. compiled: few shapes, since each is a graph that takes a while to compile.
    branching: False for a target with recurrent layers, which are fed every path of a tree from its root, while the
    costs count nodes. longest: tokens of the longest text that may come.
    """
    chains, copies = (COMPILED_CHAINS, COMPILED_COPIES) if compiled else (CHAINS, COPIES)

    def plain_steps(nodes: int, levels: Sequence[int] | None = None) -> float:
        """The cost, in plain steps, of a step that verifies so many nodes, and drafts them with the head if levels are
        given: at the start of a text or at its end, whichever is lower."""
        drafting = 0.0 if levels is None else costs.draft(rows, levels, 1)
        return min((costs.step(rows, nodes, n) + drafting) / costs.step(rows, 1, n) for n in (0, longest))

    most = max((n for n in {1 + n for n in chains} | {*TREES} if plain_steps(n) <= WORTH), default=1)
    shapes = [Shape(chain(n)) for n in sorted({min(n, depth) for n in chains}) if n < most] if head else []
    trees: list[StaticTree] = []
    if head and branching:
        trees = [fastest_tree(acceptance, nodes, depth, costs, rows) for nodes in TREES if nodes <= most]
    if compiled and trees:
        row = HeadEstimate(acceptance, depth)
        trees = [max(trees, key=lambda tree: _rate(tree, row, costs, rows))]
    shapes += [Shape(tree) for tree in dict.fromkeys(trees) if tree not in [shape.tree for shape in shapes]]
    margin = 1 + CAUTION
    shapes = [shape for shape in shapes if plain_steps(shape.nodes, shape.levels) * margin < 1 + shape.depth]
    sizes = {1, *(1 + n for n in copies if plain_steps(1 + n) * margin < 1 + n), *(shape.nodes for shape in shapes)}
    return Menu(tuple(shapes), tuple(sorted(sizes)), own_size=compiled)


def fastest_tree(
    acceptance: Sequence[Sequence[float]], nodes: int, depth: int, costs: StepCosts, rows: int
) -> StaticTree:
    """The tree of `nodes` with the most expected tokens per millisecond, over all depths."""
    row = HeadEstimate(acceptance, depth)
    trees = (likeliest_tree(acceptance, nodes, most) for most in range(1, depth + 1))
    return max(trees, key=lambda tree: _rate(tree, row, costs, rows))


def _rate(tree: StaticTree, row: HeadEstimate, costs: StepCosts, rows: int) -> float:
    """Expected tokens per millisecond after a short text."""
    time = costs.step(rows, tree.num_nodes, 0) + costs.draft(rows, Shape(tree).levels, 1)
    return (1 + row.tree_gain(tree.choices)) / time
