"""AutoDrafter: each step the draft that promises the most tokens a second, from a head, from copies, or none.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, cast

import torch
from transformers.utils import logging

from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter, with_defaults
from specheads.decoding.drafters.overlay import OrCopy, put_copies
from specheads.decoding.drafters.path_drafter import build_tree
from specheads.decoding.drafters.suffix_search import copy_ids, longest_match, row_texts
from specheads.decoding.drafters.unread import UnreadPositions
from specheads.decoding.planner import NoDraft, Plan, chain
from specheads.decoding.planner.by_cost.choice import Choice, Worth, choose, probe_is_due, reading_pays
from specheads.decoding.planner.by_cost.cost_aware import CostAwareTree
from specheads.decoding.planner.by_cost.cost_file import SHIPPED, CostTable, shipped_costs
from specheads.decoding.planner.by_cost.estimates import Calibration, CopyEstimate, HeadEstimate
from specheads.decoding.planner.by_cost.feedback import Surplus, learn_grown, learn_static
from specheads.decoding.planner.by_cost.shapes import (
    CHAINS,
    COMPILED_SIZES,
    LARGEST,
    Menu,
    Shape,
    make_menu,
)
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.planner.static import ASSUMED_RANKS
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree

LONGEST_MATCH = 32  # tokens
MOST_UNREAD = 512  # columns of features held for an idle head; it reads them then, without drafting
TREE_DEPTH, TREE_WIDTH = 6, 4  # of a cost-aware tree, as wide as its beams, where trees pay; else it is a chain
REST_AFTER, MOST_REST = 4, 7  # steps are left unplanned once 4 in a row were planned in vain: one, then one more, to 7
PACE = 1 / 16  # the weight of the newest step in the tokens that a row gains a step
READ_WIDTHS = (8, 32)  # columns in which a compiled step reads what was missed: each is a graph
_cached_chain = cache(chain)
logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class AutoDrafter(Drafter):
    """Drafts what costs least per expected token: the head's chain or tree, a copy of what followed the last tokens
    before, or nothing where nothing pays.

    head: reads the features of every position, in one pass when it drafts again after it was idle. costs: as
    `specheads tune` measured them; None: those shipped for a CPU or a GPU, and a line in the log. compiled_costs: the
    same of compiled steps; None: `costs`, if given.

    Which draft is taken follows from the costs and the tokens of this call alone, so the same costs give the same
    drafts. Every draft is a point mass: under an exact rule a seed gives the text of plain decoding whatever the costs.
    Of a plan it keeps num_nodes and depth as limits.
    """

    gives_draft_probs: ClassVar[bool] = False

    head: Drafter | None = None
    costs: CostTable | None = None
    compiled_costs: CostTable | None = None

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
        return COMPILED_SIZES

    @property
    def refillable(self) -> bool:
        return self.head is None or self.head.refillable

    @property
    def trained_length(self) -> int | None:
        return None if self.head is None else self.head.trained_length

    def table(self, device: torch.device, *, compiled: bool) -> CostTable:
        if costs := (self.compiled_costs if compiled else None) or self.costs:
            return costs
        table = shipped_costs(device.type, compiled=compiled)
        logger.warning_once(
            f"draft='auto' goes by the step costs shipped for a {SHIPPED.get(device.type, 'GPU')}; "
            f"`specheads tune MODEL{' --compile' if compiled else ''}` measures those of this machine"
        )
        return table

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """The most nodes of a step, as a chain: it is a limit, and never grown."""
        return _cached_chain(LARGEST - 1)  # it keeps the shorter chains that limit the last steps of a text

    def menu(self, table: CostTable, rows: int, *, compiled: bool, branching: bool = True, longest: int = 0) -> Menu:
        """What the planner may choose from, see `make_menu`."""
        depth = min(CHAINS[-1], (self.head and self.head.max_depth) or CHAINS[-1])
        return make_menu(
            table.for_rows(rows), rows, table.acceptance or (ASSUMED_RANKS,), depth, head=self.head is not None,
            compiled=compiled, branching=branching, longest=longest,
        )  # fmt: skip

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        return self._run(context).propose(context, sampler, plan)

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft | None:
        return self._run(context).device_draft(context, plan)

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        self._run(context).refill(context, rows, prompts)

    def _run(self, context: Context) -> _Run:
        return context.once("auto", lambda: _Run(self, context))


class _Run:
    """What AutoDrafter knows of the texts of one call of decode().

    choice: of the step for which the texts have `lengths`, from `limited`, the part of the menu within its limits, for
    the rows that are `active`. copies: by row, the length of the match and the ids that followed it. worth: of the
    tokens of this step. pace: by row, the tokens it gained a step lately. grown: the last tree if it was cost-aware,
    with what a static one promised for its time. idle: steps since the head drafted. wanted: those before it read the
    prompt in which it promised the most, but for reading. fruitless: planned steps in a row that drafted nothing. rest:
    how many steps are left unplanned now.
    """

    def __init__(self, auto: AutoDrafter, context: Context) -> None:
        self.rows, self.compiled = len(context.history), context.target.static
        table = auto.table(context.root.device, compiled=self.compiled)
        self.costs, chains_only = table.for_rows(self.rows), context.target.has_state
        self.menu = auto.menu(
            table, self.rows, compiled=self.compiled, branching=not chains_only, longest=context.target.limit
        )
        self.head = auto.head if self.menu.shapes else None
        self.assumed = table.acceptance or (ASSUMED_RANKS,)
        self.heads = [self._head_estimate() for _ in context.history]
        self.copied = [CopyEstimate() for _ in context.history]
        self.calibration = Calibration()
        self.surplus = Surplus()
        self.unread = UnreadPositions()
        self.slots = max(self.menu.drafting_slots, READ_WIDTHS[-1] if self.compiled else TREE_WIDTH * TREE_DEPTH)
        self.idle = self.wanted = self.fruitless = self.rest = 0
        self.lengths: list[int] = []
        self.active: list[bool] = []
        self.limited = self.menu
        self.copies: list[tuple[int, list[int]]] = []
        self.grown: tuple[CostAwareTree, float] | None = None
        self.choice: Choice | None = None
        self.worth = Worth(self.rows)
        self.pace = [1.0] * self.rows

    def _head_estimate(self) -> HeadEstimate:
        return HeadEstimate(self.assumed, max([CHAINS[-1], *(shape.depth for shape in self.menu.shapes)]))

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        choice = self.choose(context, plan)
        if choice.shape is not None:
            return self._propose_with_head(context, sampler, choice.shape, choice)
        self._leave_head_idle(context)
        if choice.nodes == 1:
            return DraftTree.root_only(context.root)
        paths = [[ids] if ids else [] for ids in self._chosen_copies(choice)]
        line = _cached_chain(choice.nodes - 1)
        return build_tree(context.root, context.history, paths, line, static=self.compiled)

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft | None:
        choice = self.choose(context, plan)
        if choice.nodes == 1:
            self._leave_head_idle(context)
            return DeviceDraft(context)
        if choice.shape is None or self.head is None or not self.head.on_device:
            return None
        self._begin_head()
        drafter = self._with_copies(context, choice) if self.rows > 1 else self.head
        draft = self.unread.device_draft(
            drafter, self.head, context, choice.shape.tree, at_once=self._read_width(context), slots=self.slots
        )
        return draft if self.rows == 1 else draft._replace(depth=choice.nodes - 1)  # a copy may be as long

    def refill(self, context: Context, rows: list[int], prompts: Context) -> None:
        """Forget these rows' texts, and let the head read the prompts."""
        for row, history in zip(rows, prompts.history, strict=True):
            self.heads[row], self.copied[row], self.copies[row] = self._head_estimate(), CopyEstimate(), (0, [])
            self.pace[row], self.lengths[row] = 1.0, len(history) - 1
            context.memory["texts"][row] = ""
        self.choice = self.grown = None  # the last drafts were of other texts
        self.fruitless = self.rest = 0
        if self.head is not None:
            self.unread.refill(self.head, context, rows, prompts, ReserveSlots(chain(1), self.slots))

    def choose(self, context: Context, plan: Plan) -> Choice:
        """The draft of this step, within the limits of `plan`: decided once."""
        lengths = [len(row) for row in context.history]
        if self.choice is not None and lengths == self.lengths:
            return self.choice
        self._learn(context)
        active = [left > 0 for left in context.remaining]
        self.lengths, self.grown, self.active = lengths, None, active
        self.limited = self.menu.within(plan.num_nodes, plan.depth)
        if self.head is not None:
            self.unread.add(context)
        if self.rest:
            self.rest, self.copies = self.rest - 1, [(0, [])] * self.rows
            self.choice = Choice(None, 1, (False,) * self.rows, float(sum(active)), 1.0)
        else:
            self.copies = self._find_copies(context, active, min(self.limited.sizes[-1] - 1, plan.depth))
            self.choice = self._choose(self.limited, active, context)
            self.fruitless = self.fruitless + 1 if self.choice.nodes == 1 else 0
            self.rest = min(max(0, self.fruitless - REST_AFTER + 1), MOST_REST)
        return self.choice

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
        gains = [[shape.gain(self.heads[b]) for b in rows] for shape in menu.shapes]
        unread = self._positions_read(context) if menu.shapes else 0

        step_ms = [self.costs.step(self.rows, nodes, context.bound) for nodes in menu.sizes]
        draft_ms = [self.costs.draft(self.rows, shape.levels, unread) for shape in menu.shapes]
        if context.others_wait:
            self.worth = Worth(len(rows))
        else:
            self.worth = Worth(len(rows), [context.remaining[b] for b in rows], [self.pace[b] for b in rows])
        best = choose(menu, gains, copy_gains, step_ms, draft_ms, self.worth)
        if best.shape is not None and not self.unread.has_read:
            without = choose(menu, [], copy_gains, step_ms, [], self.worth)
            self.wanted += 1
            left = sum(context.remaining[b] for b in rows)
            read_ms = self.costs.draft(self.rows, best.shape.levels, self.unread.count(context))
            read_ms -= self.costs.draft(self.rows, best.shape.levels, unread)
            if not reading_pays(best, without, self.wanted / (self.idle + 1), left, read_ms):
                best = without
        if best.shape is None and menu.shapes:
            probe, read = menu.shapes[0], max(unread, self.unread.count(context))  # a trial pays for the prompt, too
            ms = self.costs.step(self.rows, probe.nodes, context.bound)
            ms += self.costs.draft(self.rows, probe.levels, read)
            if probe_is_due(best, ms, len(rows), self.idle):
                best = Choice(probe, probe.nodes, (False,) * len(rows), self.worth(gains[0]), ms)
        taken = iter(best.copies)
        return Choice(best.shape, best.nodes, tuple(runs and next(taken) for runs in active), best.tokens, best.ms)

    def _read_width(self, context: Context) -> int:
        """How many columns a pass of a compiled step reads."""
        unread = self.unread.count(context) if self.unread.has_read else 1  # prompts are read before
        return next((width for width in READ_WIDTHS if unread <= width), READ_WIDTHS[-1])

    def _positions_read(self, context: Context) -> int:
        """What reading costs goes by: the positions missed, or the columns they are read in. The prompt, which a head
        reads once whenever it first drafts, is no cost of that step: see `reading_pays`."""
        unread = self.unread.count(context) if self.unread.has_read else 1
        return unread if not self.compiled else max(unread, self._read_width(context))

    def _propose_with_head(self, context: Context, sampler: Sampler, shape: Shape, choice: Choice) -> DraftTree:
        assert self.head is not None
        self._begin_head()
        drafter, plan = self.head, cast(Plan, shape.tree)
        if any(choice.copies):
            drafter = self._with_copies(context, choice)
        elif self.surplus.pays and not self.compiled:
            plan = self._cost_aware(shape, context)
        tree = self.unread.propose(drafter, context, sampler, ReserveSlots(plan, self.slots))
        if isinstance(plan, CostAwareTree):
            self.grown = plan, choice.rate * plan.time(tree.num_nodes, plan.levels)
        return tree

    def _leave_head_idle(self, context: Context) -> None:
        self.idle += 1
        if self.head is not None and self.unread.columns > MOST_UNREAD:
            self.unread.propose(self.head, context, Sampler(), NoDraft(ReserveSlots(chain(1), self.slots)))

    def _begin_head(self) -> None:
        for row in self.heads:
            row.fade(self.idle // 4)  # what it was like counts for longer than if it had been seen since
        self.idle = 0

    def _cost_aware(self, shape: Shape, context: Context) -> CostAwareTree:
        depth, width = self.limited.depth, 1
        if not shape.is_chain:
            depth, width = min(depth, TREE_DEPTH), TREE_WIDTH
        running = [row.means for row, runs in zip(self.heads, self.active, strict=True) if runs]
        unread = self.unread.count(context)

        def time(nodes: int, levels: tuple[int, ...]) -> float:
            return self.costs.step(self.rows, nodes, context.bound) + self.costs.draft(self.rows, levels, unread)

        return CostAwareTree(
            self.limited.sizes, depth, width=width, beams=width, time=time, calibrate=self.calibration,
            next_share=[sum(means) / len(running) for means in zip(*running, strict=True)],
            worth=lambda gains: self.worth([gain for gain, runs in zip(gains, self.active, strict=True) if runs]),
        )  # fmt: skip

    def _chosen_copies(self, choice: Choice) -> list[list[int]]:
        return [ids[: choice.nodes - 1] if taken else []
                for (_, ids), taken in zip(self.copies, choice.copies, strict=True)]  # fmt: skip

    def _with_copies(self, context: Context, choice: Choice) -> Drafter:
        """The head, with the copies that were chosen in the place of its trees."""
        assert self.head is not None
        put_copies(self.unread.memory, context, self._chosen_copies(choice), choice.nodes)
        return OrCopy(self.head)

    def _learn(self, context: Context) -> None:
        """Compare the last drafts with the text that followed."""
        if not self.lengths:
            return
        gained = [row[before:] for row, before in zip(context.history, self.lengths, strict=True)]
        for b, tokens in enumerate(gained):
            match, copy = self.copies[b]
            for i, (copied, token) in enumerate(zip(copy, tokens, strict=False)):
                self.copied[b].add(match + i, copied == token)
                if copied != token:
                    break
            if tokens:
                self.pace[b] += PACE * (len(tokens) - self.pace[b])
        if self.grown is not None:
            tree, expected = self.grown
            learn_grown(self.heads, self.calibration, tree, gained)
            ran = [len(tokens) - 1 for tokens, runs in zip(gained, self.active, strict=True) if runs]
            self.surplus.add(self.worth(ran), expected)
        elif self.choice is not None and self.choice.shape is not None:
            self.surplus.fade()
            own = [bool(tokens) and not taken for tokens, taken in zip(gained, self.choice.copies, strict=True)]
            learn_static(self.heads, self.choice.shape, context.ranks, own)
