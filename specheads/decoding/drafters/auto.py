"""AutoDrafter: each step the draft that promises the most tokens a second, from a head, from copies, or none.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from transformers.utils import logging

from specheads.decoding.drafters.base import Context, Drafter, with_defaults
from specheads.decoding.drafters.path_drafter import build_tree, cached_topology
from specheads.decoding.drafters.suffix_search import copy_ids, longest_match, row_texts
from specheads.decoding.drafters.unread import UnreadPositions
from specheads.decoding.planner import MAX_NODES, NoDraft, Plan, chain
from specheads.decoding.planner.by_cost.choice import Choice, choose, probe_is_due
from specheads.decoding.planner.by_cost.cost_aware import CostAwareTree
from specheads.decoding.planner.by_cost.cost_file import SHIPPED, CostTable, shipped_costs
from specheads.decoding.planner.by_cost.estimates import ASSUMED_RANKS, Calibration, CopyEstimate, HeadEstimate
from specheads.decoding.planner.by_cost.shapes import CHAINS, Menu, ReserveSlots, Shape, make_menu
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree

LONGEST_MATCH = 32  # tokens
MOST_UNREAD = 512  # columns of features held for an idle head; it reads them then, without drafting
TREE_DEPTH, TREE_WIDTH = 6, 4  # of a cost-aware tree, as wide as its beams, where trees pay; else it is a chain
_cached_chain = cache(chain)
logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class AutoDrafter(Drafter):
    """Drafts what costs least per expected token: the head's chain or tree, a copy of what followed the last tokens
    before, or nothing where nothing pays.

    head: reads the features of every position, in one pass when it drafts again after it was idle. costs: as
    `specheads tune` measured them; None: those shipped for a CPU or a GPU, and a line in the log.

    Which draft is taken follows from the costs and the tokens of this call alone, so the same costs give the same
    drafts. Every draft is a point mass: under an exact rule a seed gives the text of plain decoding whatever the costs.
    Of a plan it keeps num_nodes and depth as limits.
    """

    gives_draft_probs: ClassVar[bool] = False

    head: Drafter | None = None
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        if self.head is not None:
            object.__setattr__(self, "head", with_defaults(self.head))
        if self.head is not None and self.head.wants_target_top:
            raise ValueError(
                f"AutoDrafter lets its drafter miss steps, and {type(self.head).__name__} reads the target's likeliest "
                "tokens at each; give a draft head"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        return () if self.head is None else self.head.layers

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        return tuple(1 << n for n in range(MAX_NODES.bit_length()))  # each is a graph of its own, so they are few

    @property
    def trained_length(self) -> int | None:
        return None if self.head is None else self.head.trained_length

    def table(self, device: torch.device) -> CostTable:
        if self.costs is not None:
            return self.costs
        table = shipped_costs(device.type)
        logger.warning_once(
            f"draft='auto' goes by the step costs shipped for a {SHIPPED.get(device.type, 'GPU')}; "
            "`specheads tune MODEL` measures those of this machine"
        )
        return table

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """The most nodes of a step, as a chain: it is a limit, and never grown."""
        menus = [self.menu(self.table(device), rows) for rows in sorted(self.table(device).batches)]
        return chain(max(2, *(menu.sizes[-1] for menu in menus)) - 1)

    def menu(self, table: CostTable, rows: int) -> Menu:
        depth = min(CHAINS[-1], (self.head and self.head.max_depth) or CHAINS[-1])
        return make_menu(
            table.for_rows(rows), rows, table.acceptance or (ASSUMED_RANKS,), depth, head=self.head is not None
        )

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        run: _Run = context.once("auto", lambda: _Run(self, context))
        return run.draft(context, sampler, plan)


class _Run:
    """What AutoDrafter knows of the texts of one call of decode()."""

    def __init__(self, auto: AutoDrafter, context: Context) -> None:
        self.head, self.rows = auto.head, len(context.history)
        table = auto.table(context.root.device)
        self.costs, self.menu = table.for_rows(self.rows), auto.menu(table, self.rows)
        self.compiled = context.target.static
        depths = max([CHAINS[-1], *(shape.depth for shape in self.menu.shapes)])
        self.heads = [HeadEstimate(table.acceptance or (ASSUMED_RANKS,), depths) for _ in context.history]
        self.copied = [CopyEstimate() for _ in context.history]
        self.calibration = Calibration()
        self.surplus = Surplus()
        self.unread = UnreadPositions()
        self.slots = max(self.menu.drafting_slots, TREE_WIDTH * TREE_DEPTH)
        self.idle = 0  # steps since the head drafted
        self.lengths: list[int] | None = None  # of the texts when the last draft was made
        self.copies: list[tuple[int, list[int]]] = []  # by row: the length of the match, and what followed it
        self.head_draft: _HeadDraft | None = None
        self.choice: Choice | None = None

    def draft(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        active = self._learn(context.history)
        menu = self.menu.within(plan.num_nodes, plan.depth)
        self.copies = self._find_copies(context, active, min(menu.sizes[-1] - 1, plan.depth))
        if self.head is not None:
            self.unread.add(context)
        self.choice = choice = self._choose(menu, active, context)
        self.head_draft = None
        if choice.shape is not None:
            return self._draft_with_head(context, sampler, menu, choice, active)
        self.idle += 1
        if self.head is not None:
            self.unread.keep()
            if self.unread.columns > MOST_UNREAD:
                self.unread.propose(self.head, context, sampler, NoDraft(ReserveSlots(chain(1), self.slots)))
        if choice.nodes == 1:
            return DraftTree.root_only(context.root)
        paths = [[ids] if taken else [] for (_, ids), taken in zip(self.copies, choice.copies, strict=True)]
        return build_tree(context.root, context.history, paths, _cached_chain(choice.nodes - 1))

    def _find_copies(self, context: Context, active: Sequence[bool], count: int) -> list[tuple[int, list[int]]]:
        """By row the length of the longest suffix that occurred before, and up to `count` ids that followed it."""
        copies: list[tuple[int, list[int]]] = []
        for text, runs in zip(row_texts(context), active, strict=True):
            match = longest_match(text, LONGEST_MATCH) if runs else 0
            start = text.rfind(text[-match:], 0, -1) + match if match else 0
            copies.append((match, copy_ids(text, start, count) if match else []))
        return copies

    def _choose(self, menu: Menu, active: Sequence[bool], context: Context) -> Choice:
        rows = [b for b, runs in enumerate(active) if runs]
        copy_gains = [self.copied[b].gains(self.copies[b][0], len(self.copies[b][1])) for b in rows]
        chains = [self.heads[b].chain_gains() for b in rows] if menu.shapes else []
        gains = [[shape.gain(self.heads[b], row) for b, row in zip(rows, chains, strict=True)] for shape in menu.shapes]
        unread = self.unread.count(context) if menu.shapes else 0

        step_ms = [self.costs.step(self.rows, nodes, context.bound) for nodes in menu.sizes]
        draft_ms = [self.costs.draft(self.rows, shape.levels, unread) for shape in menu.shapes]
        best = choose(menu, gains, copy_gains, step_ms, draft_ms)
        if best.shape is None and menu.shapes:
            probe = menu.shapes[0]
            ms = self.costs.step(self.rows, probe.nodes, context.bound) + draft_ms[0]
            if probe_is_due(best, ms, len(rows), self.idle):
                best = Choice(probe, probe.nodes, (False,) * len(rows), len(rows) + sum(gains[0]), ms)
        taken = iter(best.copies)
        return Choice(best.shape, best.nodes, tuple(runs and next(taken) for runs in active), best.tokens, best.ms)

    def _draft_with_head(
        self, context: Context, sampler: Sampler, menu: Menu, choice: Choice, active: Sequence[bool]
    ) -> DraftTree:
        assert self.head is not None and choice.shape is not None
        plan: Plan = choice.shape.tree
        if self.surplus.pays and not self.compiled and not any(choice.copies):
            plan = self._cost_aware(menu, choice.shape, active, context)
        for row in self.heads:
            row.fade(self.idle // 4)  # what it was like counts for longer than if it had been seen since
        self.idle = 0
        tree = self.unread.propose(self.head, context, sampler, ReserveSlots(plan, self.slots))
        if isinstance(plan, CostAwareTree):
            ms = plan.time(tree.num_nodes, plan.levels)
            self.head_draft = _HeadDraft(grown=plan, expected=choice.rate * ms)
            return tree
        self.head_draft = _HeadDraft(choice.shape, tree.tokens)
        return self._with_copies(context, tree, choice) if any(choice.copies) else tree

    def _cost_aware(self, menu: Menu, shape: Shape, active: Sequence[bool], context: Context) -> CostAwareTree:
        depth, width = menu.depth, 1
        if not shape.is_chain:
            depth, width = min(depth, TREE_DEPTH), TREE_WIDTH
        running = [row.means for row, runs in zip(self.heads, active, strict=True) if runs]
        unread = self.unread.count(context)

        def time(nodes: int, levels: tuple[int, ...]) -> float:
            return self.costs.step(self.rows, nodes, context.bound) + self.costs.draft(self.rows, levels, unread)

        return CostAwareTree(
            menu.sizes, depth, width=width, beams=width, time=time, calibrate=self.calibration,
            next_share=[sum(means) / len(running) for means in zip(*running, strict=True)],
            weights=[float(runs) for runs in active],
        )  # fmt: skip

    def _with_copies(self, context: Context, tree: DraftTree, choice: Choice) -> DraftTree:
        """The head's tree of equal shape in each row, with the copy in its place where that was chosen."""
        assert choice.shape is not None
        nodes, device = choice.nodes, context.root.device
        lists, parents = [], []
        for (_, ids), taken, history in zip(self.copies, choice.copies, context.history, strict=True):
            copy = ids[: nodes - 1] if taken else []
            lists.append([history[-1], *copy, *[history[-1]] * (nodes - 1 - len(copy))])
            own = (*range(-1, len(copy)),) if taken else choice.shape.parents
            parents.append((*own, *(-1,) * (nodes - len(own))))
        depth = max(nodes - 1, choice.shape.depth)
        tokens, taken_rows = torch.tensor(lists, device=device), torch.tensor(choice.copies, device=device)
        drafted = torch.cat([tree.tokens, tokens[:, tree.num_nodes :]], 1)
        topology = cached_topology(tuple(parents), depth, device)
        tokens = torch.where(taken_rows.unsqueeze(1), tokens, drafted)
        return DraftTree(tokens, topology.parents, depth, topology=topology)

    def _learn(self, history: Sequence[Sequence[int]]) -> list[bool]:
        """Compare the last drafts with the text that followed; which rows still run."""
        if self.lengths is None:
            self.lengths = [len(row) for row in history]
            return [True] * len(history)
        gained = [row[before:] for row, before in zip(history, self.lengths, strict=True)]
        self.lengths = [len(row) for row in history]
        for b, tokens in enumerate(gained):
            match, copy = self.copies[b]
            for i, (copied, token) in enumerate(zip(copy, tokens, strict=False)):
                self.copied[b].add(match + i, copied == token)
                if copied != token:
                    break
        if self.head_draft is not None:
            self.head_draft.teach(self, gained)
        active = [bool(tokens) for tokens in gained]
        return active if any(active) else [True] * len(active)


@dataclass
class _HeadDraft:
    """The head's last draft: a static shape with its tokens (B, N), or a cost-aware tree and the tokens that a static
    one promised for the same time."""

    shape: Shape | None = None
    tokens: Tensor | None = None
    grown: CostAwareTree | None = None
    expected: float = 0.0

    def teach(self, run: _Run, gained: Sequence[Sequence[int]]) -> None:
        """Update the run's estimates. gained: by row the tokens that followed."""
        if self.grown is not None:
            for b, (tree, tokens) in enumerate(zip(self.grown.grown, gained, strict=True)):
                for depth, (children, token) in enumerate(_walk(tree.tokens, tree.parents, -1, tokens)):
                    for child in children:
                        run.calibration.add(tree.confidences[child], tree.tokens[child] == token)
                    if depth == 0:  # deeper levels were drafted where the head was sure, so they are no fair sample
                        run.heads[b].add(0, _rank(children, tree.tokens, token), len(children))
            run.surplus.add(sum(map(len, gained)), self.expected)
            return
        assert self.shape is not None and self.tokens is not None and run.choice is not None
        run.surplus.fade()
        if self.shape.is_chain and not any(run.choice.copies):  # then the number of tokens says it all
            for row, tokens in zip(run.heads, gained, strict=True):
                for depth in range(min(len(tokens), self.shape.depth)):
                    row.add(depth, 0 if depth + 1 < len(tokens) else None)
            return
        for row, drafted, tokens in zip(run.heads, self.tokens.tolist(), gained, strict=True):
            for depth, (children, token) in enumerate(_walk(drafted, self.shape.parents, 0, tokens)):
                row.add(depth, _rank(children, drafted, token), len(children))


def _walk(tokens: Sequence[int], parents: Sequence[int], root: int, text: Sequence[int]) -> list[tuple[list[int], int]]:
    """A tree's nodes against the text after its root: at each node on the way its children and the text's token, until
    no child is that token."""
    steps, node = [], root
    for token in text:
        children = [i for i, parent in enumerate(parents) if parent == node]
        if not children:
            break
        steps.append((children, token))
        following = [i for i in children if tokens[i] == token]
        if not following:
            break
        node = following[0]
    return steps


def _rank(children: Sequence[int], tokens: Sequence[int], token: int) -> int | None:
    """Which of the children is this token."""
    return next((rank for rank, child in enumerate(children) if tokens[child] == token), None)


class Surplus:
    """The tokens of cost-aware trees against those that static shapes promised for the same time."""

    FADE, WEIGHT = 0.98, 16.0

    def __init__(self) -> None:
        self.tokens = self.expected = 0.0

    def add(self, tokens: float, expected: float) -> None:
        self.tokens, self.expected = self.tokens * self.FADE + tokens, self.expected * self.FADE + expected

    def fade(self) -> None:
        """A step went by with a static shape."""
        self.add(0, 0)

    @property
    def pays(self) -> bool:
        return (self.tokens + self.WEIGHT) / (self.expected + self.WEIGHT) >= 1 - 0.02
