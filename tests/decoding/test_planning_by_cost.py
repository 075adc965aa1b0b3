"""Planning by cost: fitted curves, and trees and choices with a known optimum."""

import itertools
import math
import random

import pytest

from specheads.decoding.planner import StaticTree
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from specheads.decoding.planner.by_cost.candidates import Candidates, make_candidates
from specheads.decoding.planner.by_cost.estimates import COPY_BUCKETS, COPY_SHARES, CopyEstimate, HeadEstimate
from specheads.decoding.planner.by_cost.step_planner import (
    ROW_DRIFT,
    BatchValue,
    Choice,
    StepPlanner,
    StepState,
    choose,
    reading_pays,
)
from specheads.decoding.planner.static import likeliest_tree
from tests.support.auto_costs import RANKS, costs


def test_a_fitted_curve_never_decreases_and_is_the_nearest_one():
    noise = random.Random(0)
    for _ in range(50):
        points = [(x, x + noise.gauss(0, 4)) for x in range(1, 6)]
        fitted = [Curve.fit([(x, y + 20) for x, y in points])(x) for x, _ in points]
        assert fitted == sorted(fitted)
        # Each value of the nearest non-decreasing sequence is a mean of a run: max over starts of min over ends.
        values = [y + 20 for _, y in points]
        for i, y in enumerate(fitted):
            means = [
                min(sum(values[a:b]) / (b - a) for b in range(i + 1, 6)) for a in range(i + 1)
            ]  # fmt: skip
            assert y == pytest.approx(max(means))


def test_a_curve_is_straight_between_its_points_and_continues_after_them():
    curve = Curve(((1, 4.0), (8, 7.5), (16, 8.9)))
    assert [curve(x) for x in (0, 1, 4.5, 8, 16)] == pytest.approx([4, 4, 5.75, 7.5, 8.9])
    assert curve(24) == pytest.approx(10.3)
    with pytest.raises(ValueError, match="decreases from"):
        Curve(((1, 4.0), (2, 3.0)))


def test_a_batch_that_was_not_measured_costs_what_as_many_nodes_do():
    one = costs(batch=1)
    assert one.step(4, 2, 64) == one.step(1, 8, 64) and one.step(2, 1, 64) == one.step(1, 2, 64)
    table = CostTable(None, {1: one, 4: costs(batch=4)})
    assert [table.for_rows(rows).batch for rows in (1, 3, 4, 9)] == [1, 1, 4, 4]


def all_trees(nodes, depth, width):
    """Every static tree of so many nodes."""
    paths = [p for n in range(1, depth + 1) for p in itertools.product(range(width), repeat=n)]
    for chosen in itertools.combinations(paths, nodes - 1):
        if all(path[:-1] in {(), *chosen} for path in chosen):
            yield StaticTree(chosen)


def gain(tree):
    return sum(math.prod(RANKS[depth][rank] for depth, rank in enumerate(choice)) for choice in tree.choices)


def test_the_likeliest_tree_is_the_best_of_all():
    for nodes, depth in ((2, 3), (4, 2), (4, 3), (5, 2)):
        width = 3 if depth < 3 else 2
        best = likeliest_tree([row[:width] for row in RANKS], nodes, depth)
        assert best.num_nodes == nodes and best.depth <= depth
        assert gain(best) == pytest.approx(max(map(gain, all_trees(nodes, depth, width))))


def brute_force(menu, head_gains, copy_gains, time):
    """The best rate over all ways to give each row the head's chain, a copy or nothing within one size, or no
    draft."""
    best = 0.0
    for index, depth in [(None, 0), *enumerate(menu.chains)]:
        for nodes in menu.sizes:
            if nodes <= depth:
                continue
            total = 0.0
            for b, copies in enumerate(copy_gains):
                drafted = 0.0 if index is None else head_gains[index][b]
                total += 1 + max(0.0, copies[min(nodes, len(copies)) - 1], drafted)
            best = max(best, total / time(nodes, depth))
    return best


def test_the_choice_is_the_best_of_the_menu():
    for seed in range(40):
        coin = random.Random(seed)
        own = costs(coin.uniform(0, 2), coin.uniform(1, 8), coin.uniform(0, 1), coin.uniform(0, 1))
        menu, rows = Candidates((1, 2, 3), (1, 2, 4, 6)), coin.randint(1, 3)
        heads = [sorted(coin.uniform(0, 2) for _ in menu.chains) for _ in range(rows)]
        head_gains = [[row[i] for row in heads] for i in range(len(menu.chains))]
        longest = coin.choice((0, 3, 5))
        copies = [[0.0, *itertools.accumulate(coin.uniform(0, most) for _ in range(longest))]
                  for most in coin.choices((0, 1), (1, 2), k=rows)]  # fmt: skip

        def time(nodes, depth, own=own, rows=rows):
            return own.step(rows, nodes, 64) + (own.draft_chain(rows, depth, 1) if depth else 0)

        draft_ms = [own.draft_chain(rows, depth, 1) for depth in menu.chains]
        best = choose(menu, head_gains, copies, [time(nodes, 0) for nodes in menu.sizes], draft_ms, BatchValue(rows))
        assert best.rate == pytest.approx(brute_force(menu, head_gains, copies, time))
        assert best.ms == pytest.approx(time(best.nodes, best.depth))


def test_drafts_of_rows_that_others_wait_for_are_worth_nothing():
    alone, together = BatchValue(1, [40]), BatchValue(3)
    assert alone([2.5]) == 3.5 and together([1.0, 0.0, 2.0]) == 6.0
    value = BatchValue(3, [60, 60, 20])
    assert value([0.0] * 3) == pytest.approx(3)
    assert value([1.0] * 3) == pytest.approx(6, rel=0.01)
    assert value([0.0, 0.0, 10.0]) == pytest.approx(3, abs=0.01)  # it ends long before the others
    assert 3.5 < value([1.0, 0.0, 0.0]) < 4.5 and value([1.0, 0.0, 0.0]) == pytest.approx(value([0.0, 1.0, 0.0]))
    assert value([9.0, 0.0, 0.0]) < 0.7 * value([4.5, 4.5, 0.0])  # a lead is soon worth no more


@pytest.mark.parametrize("seed", range(5))
def test_what_gains_are_worth_is_what_they_take_off_the_time(seed):
    coin = random.Random(seed)
    rows = coin.randint(2, 6)
    remaining, gains = [coin.randint(1, 90) for _ in range(rows)], [coin.uniform(0, 3) for _ in range(rows)]
    scale = ROW_DRIFT * max(remaining) ** 0.5

    def time(gained):
        return scale * math.log(sum(math.exp((n - more) / scale) for n, more in zip(remaining, gained, strict=True)))

    value = BatchValue(rows, remaining)
    expected = rows * (time([0.0] * rows) - time([1 + gain for gain in gains]))
    assert value(gains) == pytest.approx(expected) and value(gains) < value.at_most(gains)
    few = [gain * 1e-6 for gain in gains]
    assert value.at_most(few) - rows == pytest.approx(value(few) - rows, rel=1e-3)


def batch_ms(own, menu, right, waiting, tokens=96):
    """Milliseconds until every row of a batch has gained its tokens, by one choice a step: in row b the share right[b]
    of copied tokens is accepted. waiting: do other texts wait?"""
    coin, rows = random.Random(0), len(right)
    left, total = [tokens] * rows, 0.0
    while any(left):
        runs = [b for b in range(rows) if left[b]]
        gains = [[0.0, *itertools.accumulate(right[b] ** n for n in range(1, 8))] for b in runs]
        value = BatchValue(len(runs), [] if waiting else [left[b] for b in runs])
        best = choose(menu, [], gains, [own.step(rows, nodes, 64) for nodes in menu.sizes], [], value)
        total += best.ms
        for b, copies in zip(runs, best.copies, strict=True):
            most = min(best.nodes - 1, 7) if copies else 0
            gained = 1 + next((n for n in range(most) if coin.random() >= right[b]), most)
            left[b] = max(0, left[b] - gained)
    return total


def test_a_batch_is_not_slowed_down_for_rows_that_end_before_the_others():
    own = costs(per_node=0.5)
    menu = make_candidates(own, 4, 5, head=False)
    plain = 96 * own.step(4, 1, 64)
    assert batch_ms(own, menu, [0.9, 0.9, 0.9, 0.0], waiting=True) > 1.2 * plain  # where others wait, it pays
    assert batch_ms(own, menu, [0.9, 0.9, 0.9, 0.0], waiting=False) < 1.1 * plain
    assert batch_ms(own, menu, [0.9] * 4, waiting=False) < 0.7 * plain


def test_nothing_is_drafted_where_nothing_pays():
    own = costs(per_node=2.0)
    menu = make_candidates(own, 1, 5, head=True)
    step_ms = [own.step(1, nodes, 64) for nodes in menu.sizes]
    draft_ms = [own.draft_chain(1, depth, 1) for depth in menu.chains]
    best = choose(menu, [[0.1] for _ in menu.chains], [[0.0]], step_ms, draft_ms, BatchValue(1))
    assert best.depth == 0 and best.nodes == 1


def test_what_a_copy_gains_is_the_product_of_shares_of_longer_and_longer_matches():
    coin, copies = random.Random(0), CopyEstimate()
    for _ in range(200):
        copies.add(coin.randint(1, 40), coin.random() < 0.7)
    for match in (0, 1, 5, 16, 33):
        chance, expected = float(match > 0), [0.0]
        for length in range(match, match + 20):
            bucket = max(i for i, shortest in enumerate(COPY_BUCKETS) if shortest <= max(1, length))
            chance *= copies.shares[bucket].mean(COPY_SHARES[bucket])
            expected.append(expected[-1] + chance)
        assert copies.gains(match, 20) == pytest.approx(expected)


def test_reading_the_prompt_pays_if_the_rest_of_the_text_takes_less_time_with_it():
    noise, pays = random.Random(0), 0
    for _ in range(200):
        best = Choice(2, 3, (), noise.uniform(1.5, 3), noise.uniform(4, 8))
        without, share = Choice(0, 1, (), noise.uniform(1, 1.5), 4.0), noise.random()
        tokens, read_ms = noise.uniform(1, 100), noise.uniform(0, 100)
        steps = tokens / (share * best.tokens + (1 - share) * without.tokens)
        instead = steps * share * best.tokens / without.rate  # of the steps without the head in the head's place
        faster = steps * share * best.ms + read_ms <= instead
        assert reading_pays(best, without, share, tokens, read_ms) == faster
        pays += faster
    assert 20 < pays < 180


def test_a_head_that_cannot_pay_if_all_is_accepted_is_left_out_unless_the_text_gets_long():
    assert make_candidates(costs(per_node=1.0, read=3.0), 1, 5, head=True).chains
    # A chain of n takes 4 + 3 n + 3 + (n - 1) / 2 ms, and 1 + n plain steps take 4 + 4 n: it pays from 14 on.
    dear = make_candidates(costs(per_node=3.0, read=3.0), 1, 5, head=True)
    assert not dear.chains and 32 in dear.sizes  # a copy is not drafted
    short, long = Curve(((1, 4.0), (64, 193.0))), Curve(((1, 40.0), (64, 229.0)))
    flat = Curve(((1, 0.0),))
    own = StepCosts(1, {64: short, 1024: long}, flat, flat, Curve(((1, 3.0),)), Curve(((1, 0.5),)))
    assert not make_candidates(own, 1, 5, head=True, longest=64).chains
    assert make_candidates(own, 1, 5, head=True, longest=1024).chains


def test_the_menu_holds_what_can_pay_and_fits_limits():
    wide = make_candidates(costs(per_node=0.01), 1, 4, head=True)
    assert wide.chains == (1, 2, 3, 4) and wide.sizes[-1] == 32  # no deeper than the head drafts
    assert make_candidates(costs(per_node=5.0), 1, 4, head=False).sizes == (1,)
    assert wide.within(3).chains == (1, 2) and wide.within(3).sizes == (1, 2, 3)
    assert wide.within(1).sizes == (1,) and not wide.within(1).chains
    assert not make_candidates(costs(), 1, 4, head=False).chains


def test_what_each_row_gained_is_learnt():
    own = costs(batch=2)
    planner = StepPlanner(own, make_candidates(own, 2, 5, head=False), [0.6], 2)
    planner.choose(StepState(planner.candidates, [(4, [3, 4, 9]), (0, [])], [90, 90], False, 64))
    planner.learn([[3, 7], [8]], [])
    copied = planner.copied[0].shares[3]
    assert (copied.trials, copied.hits) == pytest.approx((1 + 31 / 32, 31 / 32))  # 3 was right, and 4 was not


def test_estimates_follow_the_tokens():
    head = HeadEstimate([0.6, 0.5, 0.3], 4)
    assert head.gains == pytest.approx([0, 0.6, 0.9, 0.99, 1.017])
    for _ in range(200):
        head.add(0, 3)
    assert head.gains[1] < 0.15
    for _ in range(200):
        head.add(1, 3)
    assert head.gains[1] > 0.9 and head.gains[2] - head.gains[1] < 0.1
    copies = CopyEstimate()
    shortest, before = copies.gains(1, 1), copies.gains(8, 3)
    assert copies.gains(0, 3) == [0, 0, 0, 0] and shortest[1] < before[1]
    for _ in range(50):
        copies.add(8, hit=False)
    assert copies.gains(8, 3)[1] < before[1] / 2 and copies.gains(1, 1) == shortest, "other lengths"
