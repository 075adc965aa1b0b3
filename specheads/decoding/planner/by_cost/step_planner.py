"""StepPlanner: chooses the draft of each step of a batch, by what steps cost and what was accepted so far.

It sees numbers and tokens, no model and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specheads.decoding.planner.by_cost.choice import Choice, Worth, choose, probe_is_due, reading_pays
from specheads.decoding.planner.by_cost.curves import StepCosts
from specheads.decoding.planner.by_cost.estimates import CopyEstimate, HeadEstimate
from specheads.decoding.planner.by_cost.shapes import CHAINS, Menu, Shape

REST_AFTER, MOST_REST = 4, 7  # after 4 plans in a row without a draft, 1 step goes unplanned, then 2, … up to 7
PACE = 1 / 16  # the newest step's weight in the moving average of a row's tokens per step
NO_COPY: tuple[int, list[int]] = (0, [])


@dataclass(frozen=True, slots=True)
class StepState:
    """What a choice depends on, besides what was learnt.

    menu: what may be chosen. copies: by row, the length of the longest match and the ids that followed it before.
    remaining: by row, the tokens that it may still gain, 0 once it has finished. others_wait: may a new prompt replace
    the next row that finishes? bound: no row has more committed tokens.
    has_read: has the head read the prompts? unread: the most positions of a row that it has not read. read: the number
    of positions to charge for reading; it leaves out the prompt, which is read once, when the head first drafts.
    """

    menu: Menu
    copies: list[tuple[int, list[int]]]
    remaining: Sequence[int]
    others_wait: bool
    bound: int
    has_read: bool = False
    unread: int = 0
    read: int = 0


class StepPlanner:
    """Plans the steps of one batch.

    heads, copied, pace: by row, how the head's drafts and copies were accepted, and the tokens per step gained lately.
    choice: the last, made for `state`; worth: values that step's tokens. idle: steps since the head drafted. wanted:
    steps, before the head has read the prompt, in which it would have been best but for reading. fruitless: consecutive
    plans that drafted nothing. rest: steps still to leave unplanned; rested: steps left unplanned since the last plan.
    """

    def __init__(self, costs: StepCosts, menu: Menu, assumed: Sequence[Sequence[float]], rows: int) -> None:
        """assumed: by depth and rank, what a head is expected to get right before any text says so."""
        self.costs, self.menu, self.assumed, self.rows = costs, menu, assumed, rows
        self.heads = [self._head_estimate() for _ in range(rows)]
        self.copied = [CopyEstimate() for _ in range(rows)]
        self.pace = [1.0] * rows
        self.idle = self.wanted = self.fruitless = self.rest = self.rested = 0
        self.state: StepState | None = None
        self.choice: Choice | None = None
        self.worth = Worth(rows)

    def _head_estimate(self) -> HeadEstimate:
        return HeadEstimate(self.assumed, max([CHAINS[-1], *(shape.depth for shape in self.menu.shapes)]))

    def rests(self) -> bool:
        """Is the next step left unplanned? It then drafts nothing, like the one before. Call once a step."""
        if not self.rest:
            return False
        self.rest -= 1
        self.rested += 1
        self.idle += 1
        return True

    def choose(self, state: StepState) -> Choice:
        """The draft of the next step, unless it `rests`."""
        self.state = state
        self.choice = self._best(state)
        self.fruitless = self.fruitless + 1 if self.choice.nodes == 1 else 0
        self.rest = min(max(0, self.fruitless - REST_AFTER + 1), MOST_REST)
        if self.choice.shape is None:
            self.idle += 1
        else:
            for row in self.heads:
                row.fade(self.idle // 4)  # idle steps age an estimate less than trials do
            self.idle = 0
        return self.choice

    def _best(self, state: StepState) -> Choice:
        menu, rows = state.menu, [b for b, left in enumerate(state.remaining) if left > 0]
        copy_gains = [self.copied[b].gains(state.copies[b][0], len(state.copies[b][1])) for b in rows]
        gains = [[shape.gain(self.heads[b]) for b in rows] for shape in menu.shapes]
        step_ms = [self.costs.step(self.rows, nodes, state.bound) for nodes in menu.sizes]
        draft_ms = [self.costs.draft(self.rows, shape.levels, state.read) for shape in menu.shapes]
        if state.others_wait:
            self.worth = Worth(len(rows))
        else:
            self.worth = Worth(len(rows), [state.remaining[b] for b in rows], [self.pace[b] for b in rows])
        best = choose(menu, gains, copy_gains, step_ms, draft_ms, self.worth)
        if best.shape is not None and not state.has_read:
            without = choose(menu, [], copy_gains, step_ms, [], self.worth)
            self.wanted += 1
            left = sum(state.remaining[b] for b in rows)
            read_ms = self.costs.draft(self.rows, best.shape.levels, state.unread)
            read_ms -= self.costs.draft(self.rows, best.shape.levels, state.read)
            if not reading_pays(best, without, self.wanted / (self.idle + 1), left, read_ms):
                best = without
        if best.shape is None and menu.shapes:
            probe, read = menu.shapes[0], max(state.read, state.unread)  # a probe pays for reading the prompt, too
            ms = self.costs.step(self.rows, probe.nodes, state.bound)
            ms += self.costs.draft(self.rows, probe.levels, read)
            if probe_is_due(best, ms, len(rows), self.idle):
                best = Choice(probe, probe.nodes, (False,) * len(rows), self.worth(gains[0]), ms)
        taken = iter(best.copies)
        copies = tuple(left > 0 and next(taken) for left in state.remaining)
        return Choice(best.shape, best.nodes, copies, best.tokens, best.ms)

    def learn(self, gained: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]]) -> None:
        """Compare the last planned drafts with the text that followed. gained: by row, its tokens since then; ranks: by
        row, the sibling ranks of the accepted drafts."""
        if self.state is None:
            return
        steps, self.rested = self.rested + 1, 0
        for b, tokens in enumerate(gained):
            match, copy = self.state.copies[b]
            for i, (copied, token) in enumerate(zip(copy, tokens, strict=False)):
                self.copied[b].add(match + i, copied == token)
                if copied != token:
                    break
            if tokens:  # in unplanned steps each running row gained one
                self.pace[b] += (1 - (1 - PACE) ** steps) * (max(1.0, len(tokens) / steps) - self.pace[b])
        if self.choice is not None and self.choice.shape is not None:
            own = [bool(tokens) and not taken for tokens, taken in zip(gained, self.choice.copies, strict=True)]
            learn_static(self.heads, self.choice.shape, ranks, own)

    def forget(self, rows: Sequence[int]) -> None:
        """Forget these rows' texts: new prompts replace them, for which nothing has been drafted yet."""
        for row in rows:
            self.heads[row], self.copied[row], self.pace[row] = self._head_estimate(), CopyEstimate(), 1.0
            if self.state is not None:
                self.state.copies[row] = NO_COPY
        self.choice = None
        self.fruitless = self.rest = 0


def learn_static(
    heads: Sequence[HeadEstimate], shape: Shape, ranks: Sequence[Sequence[int]], drafted: Sequence[bool]
) -> None:
    """Learn from a static tree, in the rows where it was drafted: by depth, which child was accepted, if any.

    ranks: the sibling ranks of each row's accepted drafts."""
    for row, accepted, counts in zip(heads, ranks, drafted, strict=True):
        node: tuple[int, ...] = ()
        for depth, rank in enumerate((*accepted, None)) if counts else ():
            children = shape.children.get(node, ())
            if not children:
                break
            row.add(depth, rank, len(children))
            node = children[rank or 0]
