"""Calibrated trees: the best of their size on the positions counted, worth what they say, and saved with the head."""

import itertools

import pytest
import torch

from specheads import SpecModel, StaticTree, chain, convert
from specheads.models.calibration import calibrate_tree, expected_length, measure_ranks
from tests.support.tiny_models import tiny_llama


def prefix_closed_trees(width, depth, size):
    """All trees of `size` nodes below the root, as sets of choices."""
    every = [c for d in range(1, depth + 1) for c in itertools.product(range(width), repeat=d)]
    for chosen in itertools.combinations(every, size):
        if all(len(c) == 1 or c[:-1] in chosen for c in chosen):
            yield chosen


def accepted(choices, row):
    """How many tokens a tree of these choices has accepted where the true tokens have the ranks of `row`."""
    return sum(tuple(row[: len(choice)]) == choice for choice in choices)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_calibrated_tree_is_the_best_of_its_size(size):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        ranks = torch.randint(-1, 2 if seed % 2 else 3, (40, 2 if seed < 3 else 3), generator=generator)
        if int(ranks.max()) == 2:
            ranks = ranks[:, :2]  # 39 choices would be 575,757 trees of 5
        width, depth = int(ranks.max()) + 1, ranks.shape[1]
        plan = calibrate_tree(ranks, size + 1)
        totals = [
            sum(accepted(tree, row) for row in ranks.tolist()) for tree in prefix_closed_trees(width, depth, size)
        ]
        assert plan.num_nodes == size + 1
        assert sum(accepted(plan.choices, row) for row in ranks.tolist()) == max(totals)
        assert expected_length(plan, ranks) == pytest.approx(1 + max(totals) / len(ranks))


def test_depths_that_are_right_together_are_counted_together():
    together = torch.tensor([[0, 0, 0]] * 50 + [[1, 1, 1]] * 40)
    assert calibrate_tree(together, 7).choices == ((0,), (1,), (0, 0), (1, 1), (0, 0, 0), (1, 1, 1))


def test_calibration_keeps_to_the_depth_asked_for_and_to_what_was_ever_right():
    ranks = torch.tensor([[0, 0, 0], [0, 1, -1], [0, -1, 0]])
    assert calibrate_tree(ranks, 10).choices == ((0,), (0, 0), (0, 1), (0, 0, 0))
    assert calibrate_tree(ranks, 10, max_depth=2).choices == ((0,), (0, 0), (0, 1))
    with pytest.raises(ValueError, match="untrained"):
        calibrate_tree(torch.full((5, 3), -1), 4)
    for wrong in 1, 1025:
        with pytest.raises(ValueError, match=f"num_nodes={wrong} must be 2"):
            calibrate_tree(ranks, wrong)


def test_ranks_that_no_saved_tree_may_have_are_left_out():
    """Of a head that knows little and few rows; `calibrate --save` failed at its end."""
    model = convert(tiny_llama(num_hidden_layers=2, vocab_size=2048), "medusa", num_heads=2)
    ranks = torch.tensor([[1087, 0], [2, 1500], [1023, 3], [1087, 0]])
    tree = calibrate_tree(ranks, 8)
    assert tree.choices == ((2,), (1023,), (1023, 3))
    model.set_default_tree(tree)
    assert expected_length(tree, ranks) == 1 + 3 / 4


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3", "parallel"])
def test_ranks_are_measured_on_rows_and_the_tree_is_saved_with_the_head(kind, tmp_path):
    base = tiny_llama(num_hidden_layers=2)
    model = convert(base, kind).train()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (5, 20), generator=generator).tolist()]
    ranks = measure_ranks(model, rows, batch_size=2)
    assert model.training and not model.base.training
    assert torch.equal(ranks, measure_ranks(model, rows, batch_size=5))
    tree = StaticTree(((0,), (1,), (1, 0)))
    model.set_default_tree(tree.choices)
    model.save_pretrained(tmp_path / "head")
    again = SpecModel.from_pretrained(tmp_path / "head", base=base)
    assert again.head.default_plan(again.device, False) == tree
    again.set_default_tree("chain:2")
    assert again.head.default_plan(again.device, False) == StaticTree(((0,), (0, 0)))
    assert expected_length("chain:2", ranks) == expected_length(chain(2), ranks)
    with pytest.raises(ValueError, match="'sampled:2,1' is no static tree"):
        again.set_default_tree("sampled:2,1")
    again.set_default_tree(None)
    assert again.head.default_plan(again.device, False) == convert(base, kind).head.default_plan(again.device, False)
    with pytest.raises(ValueError, match="no position of the 1 rows was scored"):
        measure_ranks(model, [{"input_ids": [1, 2], "labels": [1, 2]}])


def test_a_heads_tree_may_be_given_as_text():
    model = convert(tiny_llama(num_hidden_layers=2), "medusa", tree="chain:2")
    assert model.head.config.tree == ((0,), (0, 0)) == convert(model.base, "medusa", tree=chain(2)).head.config.tree


def test_a_saved_tree_that_is_no_tree_is_refused():
    with pytest.raises(ValueError, match=r"choice \(0, 1\) has no parent"):
        convert(tiny_llama(num_hidden_layers=2), "medusa", tree=[[0, 1]])
