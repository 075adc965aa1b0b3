"""Accepted length is the joint one, and its sums add exactly however the positions were cut."""

import itertools

import pytest
import torch

from specheads.data.batches import Collator
from specheads.decoding.planner import StaticTree, chain
from specheads.decoding.results import RANGES, counts_by_range, range_name
from specheads.losses import metrics
from specheads.losses.metrics import AcceptanceMeter, TrainingMeter, accepted_length, depths_reached
from specheads.losses.targets import ENDED
from tests.reference.slow_heads import rows, spec_model


def random_ranks(positions=200, depths=4, seed=0):
    """Ranks −1 … 3 that agree across depths more than chance would have it."""
    generator = torch.Generator().manual_seed(seed)
    easy = torch.rand(positions, 1, generator=generator)
    hit = torch.rand(positions, depths, generator=generator) < easy
    miss = torch.randint(-1, 4, (positions, depths), generator=generator)
    miss[miss == 0] = -1
    return torch.where(hit, 0, miss)


def brute_force(ranks):
    """Accepted length, accuracies and conditional accuracies, a position and a depth at a time."""
    rows = ranks.tolist()
    total = 0
    for row in rows:
        total += 1
        for rank in row:
            if rank != 0:
                break
            total += 1
    marginal, conditional = [], []
    for depth in range(len(rows[0])):
        marginal.append(sum(row[depth] == 0 for row in rows) / len(rows))
        reached = [row for row in rows if all(rank == 0 for rank in row[:depth])]
        conditional.append(sum(row[depth] == 0 for row in reached) / len(reached))
    return total / len(rows), marginal, conditional


def test_accepted_length_equals_brute_force():
    ranks = random_ranks()  # hits at one position go together, so this is not the product of the depths' accuracies
    length, marginal, conditional = brute_force(ranks)
    meter = AcceptanceMeter()
    meter.add(ranks)
    report = meter.compute()
    assert accepted_length(ranks) == pytest.approx(length, abs=1e-12)
    assert report["accepted_length"] == pytest.approx(length, abs=1e-12)
    for k in range(ranks.shape[1]):
        assert report[f"accuracy_depth_{k + 1}"] == pytest.approx(marginal[k], abs=1e-12)
        assert report[f"conditional_accuracy_depth_{k + 1}"] == pytest.approx(conditional[k], abs=1e-12)


def test_a_step_at_the_end_of_an_answer_gains_what_is_left_of_it():
    """Answers of 1 to 6 tokens after the one drafted from, every pattern of right drafts; a step gains no more."""
    ranks, gained, by_depth = [], [], {k: [] for k in range(3)}
    for left in range(1, 7):
        for hits in itertools.product((True, False), repeat=3):
            ranks.append([ENDED if s >= left - 1 else 0 if hit else 5 for s, hit in enumerate(hits)])
            gained.append(min(left, 1 + next((s for s, hit in enumerate(hits) if not hit), 3)))
            for k in range(min(3, left - 1)):
                by_depth[k].append((hits[k], all(hits[:k])))
    meter = AcceptanceMeter(chain(3))
    alphas = torch.where(torch.tensor(ranks) == ENDED, 0.9, torch.where(torch.tensor(ranks) == 0, 1.0, 0.0))
    meter.add(torch.tensor(ranks), alphas)
    found = meter.compute()
    mean = sum(gained) / len(gained)
    for name in ("accepted_length", "accepted_length_tree", "accepted_length_sampled"):
        assert found[name] == pytest.approx(mean), name
    for k, drafts in by_depth.items():
        assert found[f"accuracy_depth_{k + 1}"] == found[f"acceptance_depth_{k + 1}"] == 0.5
        after = [hit for hit, reached in drafts if reached]
        assert found[f"conditional_accuracy_depth_{k + 1}"] == sum(after) / len(after)


def test_a_depth_that_no_answer_reaches_has_no_accuracy():
    assert accepted_length(torch.tensor([[ENDED, ENDED]])) == 1
    meter = AcceptanceMeter()
    meter.add(torch.tensor([[0, ENDED], [1, ENDED], [ENDED, ENDED]]), torch.ones(3, 2))
    found = meter.compute()
    assert found["accepted_length"] == 1 + 1 / 3 and found["accuracy_depth_1"] == 0.5
    assert not [name for name in found if name.endswith("depth_2")]


def test_meters_of_any_parts_add_up_to_the_whole():
    ranks, overlaps = random_ranks(100), torch.rand(100, 4, dtype=torch.float64)
    whole = AcceptanceMeter(TREE)
    whole.add(ranks, overlaps)
    parts = AcceptanceMeter(TREE)
    for some, few in zip(ranks.split([1, 30, 0, 69]), overlaps.split([1, 30, 0, 69]), strict=True):
        piece = AcceptanceMeter(TREE)
        piece.add(some, few)
        piece.add(None)
        parts.merge(piece)
    parts.merge(AcceptanceMeter())
    found = parts.compute()
    assert found.pop("accepted_length_error") > 0  # of three batches; the whole is one
    assert found == pytest.approx(whole.compute(), rel=1e-12)


TREE = StaticTree(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0)))


def test_a_tree_accepts_the_path_whose_ranks_it_holds():
    ranks = torch.tensor(
        [[0, 0, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [1, 2, 0, 0], [2, 0, 0, 0], [-1, 0, 0, 0], [0, 3, 0, 0]]
    )
    assert depths_reached(TREE, ranks).tolist() == [3, 2, 2, 1, 0, 0, 1]
    meter = AcceptanceMeter(TREE)
    meter.add(ranks)
    assert meter.compute()["accepted_length_tree"] == 1 + 9 / 7
    # A chain's tree is the chain; one deeper than what was scored is not judged.
    for depth, reported in ((4, True), (5, False)):
        meter = AcceptanceMeter(chain(depth))
        meter.add(ranks)
        report = meter.compute()
        assert ("accepted_length_tree" in report) is reported
        assert not reported or report["accepted_length_tree"] == report["accepted_length"]


def test_sampled_length_is_the_joint_one_over_overlaps():
    overlaps = torch.tensor([[0.5, 0.8], [1.0, 0.1]], dtype=torch.float64)
    meter = AcceptanceMeter()
    meter.add(torch.zeros(2, 2), overlaps)
    meter.add(torch.zeros(5, 2))  # a batch without overlaps does not count in what they are averaged over
    report = meter.compute()
    assert report["accepted_length_sampled"] == pytest.approx(1 + ((0.5 + 0.4) + (1.0 + 0.1)) / 2)
    assert [report["acceptance_depth_1"], report["acceptance_depth_2"]] == pytest.approx([0.75, 0.45])


def test_terms_are_means_over_tokens_of_all_processes():
    ranks = random_ranks(10)
    states = []
    for tokens, sums in ((3, (6.0, 1.0)), (5, (2.0, 4.0))):
        meter = TrainingMeter()
        # Two micro-batches, each divided by the 16 tokens of the whole step.
        for value, part in zip(sums, ranks.split(5), strict=True):
            meter.add(part, {"ce": torch.tensor(value / 16)}, torch.tensor(16), torch.tensor(tokens))
        states.append(meter.state())
    report = TrainingMeter.combined(states)
    assert report["ce"] == pytest.approx((6 + 1 + 2 + 4) / (2 * (3 + 5)))
    assert report["accepted_length"] == accepted_length(ranks)


def test_a_process_without_a_scored_position_changes_nothing():
    meter, idle = TrainingMeter(), TrainingMeter()
    meter.add(random_ranks(10), {"ce": torch.tensor(2.0)}, 4, torch.tensor(4))
    idle.add(None, {}, 1, torch.tensor(0))
    assert TrainingMeter.combined([meter.state(), idle.state()]) == TrainingMeter.combined([meter.state()])
    assert TrainingMeter.combined([idle.state()]) == {}


def test_ranks_that_cannot_be_counted_say_why():
    with pytest.raises(ValueError, match="no position was scored"):
        accepted_length(torch.zeros(0, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="expected \\(positions, depths\\)"):
        accepted_length(torch.zeros(3, dtype=torch.long))
    meter = AcceptanceMeter()
    meter.add(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="2 depths cannot be added to ranks of 3"):
        meter.add(torch.zeros(2, 2))


def test_accepted_length_by_output_position_is_that_of_the_starts_of_each_range(monkeypatch):
    """By brute force over rows with several answers; decoding's steps are counted by the same ranges."""
    monkeypatch.setattr(metrics, "RANGES", (0, 3, 6, 12))
    data = rows(17, 14)
    data[0]["labels"] = [-100, -100, *data[0]["input_ids"][2:11], -100, -100, *data[0]["input_ids"][13:]]
    model = spec_model("medusa").eval()
    with torch.no_grad():
        out = model(**Collator(0)(data))
    meter, found = AcceptanceMeter(), {}
    guesses = torch.randint(0, 2, out.ranks.shape, generator=torch.Generator().manual_seed(0))
    right = torch.where(out.ranks == ENDED, ENDED, guesses)  # of a head that has learnt something
    meter.add(right, positions=out.positions)
    starts = iter(zip(right.tolist(), out.positions.tolist(), strict=True))
    for row in data:
        before = 0
        for t in range(len(row["labels"]) - 1):
            before = before + 1 if row["labels"][t + 1] != -100 else 0
            if before and t + 2 < len(row["labels"]) and row["labels"][t + 2] != -100:
                ranks, position = next(starts)
                assert position == before
                run = next((s for s, rank in enumerate(ranks) if rank != 0), len(ranks))
                found.setdefault(max(at for at in (0, 3, 6, 12) if at <= before), []).append(1 + run)
    assert next(starts, None) is None and len(found) == 3
    computed = {name: value for name, value in meter.compute().items() if name.startswith("accepted_length_from_")}
    assert computed == pytest.approx({f"accepted_length_from_{at}": sum(n) / len(n) for at, n in found.items()})
    counted = counts_by_range([[1, 2, 1, 3, 4], [1, 1]], (0, 3, 6, 12))
    assert {at: (one.steps, one.tokens) for at, one in counted.items()} == {0: (2, 3), 3: (2, 4), 6: (1, 4)}
    alone = AcceptanceMeter()
    alone.add(out.ranks[:1], positions=out.positions[:1])
    assert not any("from" in name for name in alone.compute()), "a single range is the accepted length itself"
    assert [range_name(at) for at in RANGES] == ["0–1k", "1–4k", "4–16k", "16k+"]
