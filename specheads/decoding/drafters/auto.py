"""AutoDrafter: each step drafts with a head, with copies or not at all, whichever promises the most tokens a second.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter, with_defaults
from specheads.decoding.drafters.lookup import copy_ids, longest_match, row_texts
from specheads.decoding.drafters.path_drafter import build_tree
from specheads.decoding.drafters.pending import HeadOrCopy, PendingFeatures, put_copies
from specheads.decoding.kernels.few_rows import MIN_BYTES
from specheads.decoding.planner import NoDraft, Plan, chain
from specheads.decoding.planner.by_cost.candidates import CHAINS, COMPILED_SIZES, LARGEST, make_candidates
from specheads.decoding.planner.by_cost.cost_file import CostTable, shipped_costs
from specheads.decoding.planner.by_cost.estimates import SAMPLED_SHARE
from specheads.decoding.planner.by_cost.step_planner import Choice, StepPlanner, StepState
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.planner.static import ASSUMED_RANKS
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.verifier import Verifier
from specheads.options import shown

LONGEST_MATCH = 32  # tokens
MAX_PENDING = 512  # columns of features held for an idle head; past them it reads all, without drafting
READ_WIDTHS = (8, 32)  # columns in which a compiled step reads unread positions: each width is a graph
_cached_chain = cache(chain)
logger = logging.get_logger(__name__)


class HeadUse(NamedTuple):
    """depth: of the head's chain in a step, 0 if it does not draft. read: the positions that it reads for that."""

    depth: int
    read: int


# Called with each step's HeadUse, for whoever asks afterwards what drafting cost.
head_watch: ContextVar[Callable[[HeadUse], None] | None] = ContextVar("head_watch", default=None)


def bundled_costs(weights: Iterable[torch.Tensor], device_type: str, *, compiled: bool) -> CostTable:
    """The shipped costs for a base with these weights."""
    large = sum(weight.nbytes for weight in weights) >= MIN_BYTES
    return shipped_costs(device_type, compiled=compiled, large=large)


@dataclass(frozen=True, eq=False)
class AutoDrafter(Drafter):
    """Drafts what costs least per expected token: the head's chain or tree, a copy of what followed an earlier
    occurrence of the last tokens, or nothing where nothing pays.

    head: reads the features of every position; after idle steps, all that it missed in one pass. costs: as measured by
    `specheads tune`; None: those shipped for a small or a large base on a CPU, or for a GPU, with a line in the log.
    compiled_costs: the same for compiled steps; None: `costs`, if given.

    The choice depends on the costs, the tokens of this call and whether they are sampled, so the same costs give the
    same drafts. Every draft is a point mass: under an exact rule a seed gives the text of plain decoding whatever the
    costs. Of a plan only num_nodes and depth are used, as limits.
    """

    gives_draft_probs: ClassVar[bool] = False

    head: Drafter | None = None
    costs: CostTable | None = None
    compiled_costs: CostTable | None = None

    def __post_init__(self) -> None:
        for name in ("costs", "compiled_costs"):
            if not isinstance(costs := getattr(self, name), CostTable | None):
                raise TypeError(f"{name}={shown(costs)} is no table of costs; give CostTable.load(Path(FILE))")
        if self.head is not None:
            object.__setattr__(self, "head", with_defaults(self.head, "head"))
        if self.head is not None and self.head.wants_target_top:
            raise ValueError(
                f"AutoDrafter lets its drafter miss steps, and {type(self.head).__name__} reads the target's likeliest "
                "tokens at each; give a draft head"
            )
        if self.head is not None and not self.head.gives_draft_probs:
            raise ValueError(
                "AutoDrafter plans the trees of a draft head or DraftModel by their probabilities, and "
                f"{type(self.head).__name__} has none; leave it out: earlier text is copied without it"
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
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return () if self.head is None else self.head.draft_modules

    @property
    def trained_length(self) -> int | None:
        return None if self.head is None else self.head.trained_length

    def table(self, target: Verifier, device: torch.device) -> CostTable:
        compiled = target.static
        if costs := (self.compiled_costs if compiled else None) or self.costs:
            return costs
        weights = (weight for module in target.modules for weight in module.parameters())
        table = bundled_costs(weights, device.type, compiled=compiled)
        logger.warning_once(
            f"draft='auto' uses the bundled step costs of a {table.title}; "
            f"`specheads tune MODEL{' --compile' if compiled else ''}` measures those of this machine"
        )
        return table

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """The most nodes of a step, as a chain that is only a limit and never grown."""
        return _cached_chain(LARGEST - 1)  # one object, as it caches the shorter chains for the last steps of a text

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        return self._run(context).propose(context, sampler, plan)

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft | None:
        return self._run(context).device_draft(context, plan)

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        self._run(context).refill(context, rows, prompts)

    def _run(self, context: Context) -> _Run:
        return context.memoize("auto", lambda: _Run(self, context))


class _Run:
    """What AutoDrafter knows about the texts of one call of decode(), and how it drafts what `planner` chooses.

    choice, copies: for the step at which the texts have the lengths `planned`; copies as in `StepState`. head: None if
    none of its chains can pay. pending: what the head has not read.
    """

    def __init__(self, auto: AutoDrafter, context: Context) -> None:
        self.rows, self.compiled = len(context.history), context.target.static
        table = auto.table(context.target, context.root.device)
        costs = table.for_rows(self.rows)
        depth = min(CHAINS[-1], (auto.head and auto.head.max_depth) or CHAINS[-1])
        candidates = make_candidates(
            costs, self.rows, depth, head=auto.head is not None, compiled=self.compiled, longest=context.target.limit
        )
        self.head = auto.head if candidates.chains else None
        share = SAMPLED_SHARE if context.sampled else 1.0
        assumed = [share * ranks[0] for ranks in table.acceptance or (ASSUMED_RANKS,)]
        self.planner = StepPlanner(costs, candidates, assumed, self.rows)
        self.pending = PendingFeatures()
        self.slots = max([1 + depth for depth in candidates.chains], default=0)
        if self.compiled:
            self.slots = max(self.slots, READ_WIDTHS[-1])
        self.planned: list[int] = []
        self.copies: list[tuple[int, list[int]]] = []
        self.choice: Choice | None = None

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        choice = self.choose(context, plan)
        if choice.depth:
            assert self.head is not None
            drafter = self._with_copies(context, choice) if any(choice.copies) else self.head
            plan = ReserveSlots(_cached_chain(choice.depth), self.slots)
            return self.pending.propose(drafter, context, sampler, plan)
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
        if not choice.depth or self.head is None or not self.head.on_device:
            return None
        drafter = self._with_copies(context, choice) if self.rows > 1 else self.head
        draft = self.pending.device_draft(
            drafter,
            self.head,
            context,
            _cached_chain(choice.depth),
            at_once=self._read_width(context),
            slots=self.slots,
        )
        return draft if self.rows == 1 else draft._replace(depth=choice.nodes - 1)  # a copy may be as long

    def refill(self, context: Context, rows: list[int], prompts: Context) -> None:
        """Forget these rows' texts, and let the head read the prompts."""
        self.planner.forget(rows)
        self.choice = None
        for row, history in zip(rows, prompts.history, strict=True):
            self.planned[row] = len(history) - 1
            context.memory["texts"][row] = ""
        if self.head is not None:
            self.pending.refill(self.head, context, rows, prompts, ReserveSlots(chain(1), self.slots))

    def choose(self, context: Context, plan: Plan) -> Choice:
        """The draft of this step, within the limits of `plan`; decided once a step."""
        lengths = [len(row) for row in context.history]
        if self.choice is not None and lengths == self.planned:
            return self.choice
        if self.head is not None:
            self.pending.add(context)
        if self.planned:
            gained = [row[before:] for row, before in zip(context.history, self.planned, strict=True)]
            self.planner.learn(gained, context.ranks)
        state = self._state(context, plan)
        self.planned, self.copies, self.choice = lengths, state.copies, self.planner.choose(state)
        if (watch := head_watch.get()) is not None:
            watch(HeadUse(self.choice.depth, state.read))
        return self.choice

    def _state(self, context: Context, plan: Plan) -> StepState:
        candidates = self.planner.candidates.within(min(plan.num_nodes, 1 + plan.depth))
        copies = find_copies(context, candidates.sizes[-1] - 1)
        step = candidates, copies, context.remaining, context.queue_pending, context.bound
        if self.head is None or not candidates.chains:
            return StepState(*step)
        has_read, unread = self.pending.has_read, self.pending.count
        read = unread if has_read else 1
        if self.compiled:
            read = max(read, self._read_width(context))
        return StepState(*step, has_read, unread, read)

    def _read_width(self, context: Context) -> int:
        """How many columns a pass of a compiled step reads."""
        unread = self.pending.count if self.pending.has_read else 1  # prompts are read in a pass of their own
        return next((width for width in READ_WIDTHS if unread <= width), READ_WIDTHS[-1])

    def _leave_head_idle(self, context: Context) -> None:
        if self.head is not None and self.pending.columns > MAX_PENDING:
            self.pending.propose(self.head, context, Sampler(), NoDraft(ReserveSlots(chain(1), self.slots)))

    def _chosen_copies(self, choice: Choice) -> list[list[int]]:
        return [ids[: choice.nodes - 1] if taken else []
                for (_, ids), taken in zip(self.copies, choice.copies, strict=True)]  # fmt: skip

    def _with_copies(self, context: Context, choice: Choice) -> Drafter:
        """The head, with its trees replaced by the chosen copies."""
        assert self.head is not None
        put_copies(self.pending.memory, context, self._chosen_copies(choice), choice.nodes)
        return HeadOrCopy(self.head)


def find_copies(context: Context, count: int) -> list[tuple[int, list[int]]]:
    """By row, the length of the longest suffix that occurred before, and up to `count` ids that followed it; 0 and
    none for rows that have finished."""
    copies = []
    for text, left in zip(row_texts(context), context.remaining, strict=True):
        match = longest_match(text, LONGEST_MATCH) if left > 0 else 0
        start = text.rfind(text[-match:], 0, -1) + match if match else 0
        copies.append((match, copy_ids(text, start, count) if match else []))
    return copies
