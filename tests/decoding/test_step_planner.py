"""The plan of each step of a batch: which steps have one, and what is learnt between two of them."""

import pytest

from specheads.decoding.planner.by_cost.shapes import make_menu
from specheads.decoding.planner.by_cost.step_planner import StepPlanner, StepState
from tests.support.auto_costs import RANKS, costs


def test_what_was_gained_without_planning_is_learnt_with_the_next_plan():
    own = costs(per_node=3.0, batch=2)
    menu = make_menu(own, 2, RANKS, 5, head=False)

    def after(steps):
        """A planner after steps in vain, in each of which both rows gained a token, and how many of them it planned."""
        planner, plans, gained = StepPlanner(own, menu, RANKS, 2), 0, [[], []]
        planner.pace = [2.0, 1.0]
        for step in range(steps):
            if not planner.rests():
                planner.learn(gained, [])
                copies = [(4, [3, 4, 9]) if step == 3 else (0, []), (0, [])]
                planner.choose(StepState(menu, copies, [90 - step] * 2, others_wait=False, bound=64))
                gained, plans = [[], []], plans + 1
            for row in gained:
                row.append(step)
        planner.learn(gained, [])
        return planner, plans

    for steps in range(1, 30):
        planner, plans = after(steps)
        assert planner.pace == pytest.approx([1 + (15 / 16) ** steps, 1.0])
        assert plans == min(steps, 4) + sum(steps > first for first in (5, 8, 12, 17, 23))
    copied = [after(steps)[0].copied[0].shares[3] for steps in (3, 4, 5)]
    assert [share.trials for share in copied] == [share.hits for share in copied] == pytest.approx([0, 1, 1 + 31 / 32])
