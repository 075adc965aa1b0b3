"""RecordDraftLogits: every plan's tree is unchanged, and has the draft logits of each node with children."""

import itertools

import pytest
import torch

from specheads.decoding.planner import ChildLogits, SampledTree
from specheads.decoding.planner.plan import RecordDraftLogits
from specheads.decoding.probs.sampler import Sampler
from tests.decoding.test_planner import PLANS, TableDraft, paths_of

IDS = [3, 4, 8, 20, 31, 32, 33, 34, 35]


def grown(plan, draft, batch, vocab_size):
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(0))
    return plan.grow(torch.arange(batch), draft, sampler, vocab_size)


def inner_nodes(tree, row):
    return [node for node in range(tree.num_nodes) if (tree.parents[row] == node).any()]


def test_each_node_with_children_has_its_draft_logits():
    for ids, batch, name in itertools.product([None, IDS], [1, 3], PLANS):
        draft = TableDraft(batch, len(IDS), seed=batch, ids=ids)
        vocab_size = len(IDS) if ids is None else 40
        plain = grown(PLANS[name], draft, batch, vocab_size)
        tree = grown(RecordDraftLogits(PLANS[name]), draft, batch, vocab_size)
        assert plain.logits is None
        assert torch.equal(tree.tokens, plain.tokens) and torch.equal(tree.parents, plain.parents)
        for row in range(batch):
            paths = paths_of(tree, row)
            nodes = [node for node in inner_nodes(tree, row) if paths[node] is not None]
            assert nodes
            for node in nodes:
                recorded = tree.logits.over_target(tree.logits.at(torch.arange(batch) * tree.num_nodes + node))[row]
                wanted = torch.full((vocab_size,), -torch.inf)
                wanted[ids or slice(None)] = draft.logits(row, paths[node])
                assert torch.equal(recorded, wanted)
                assert torch.equal(
                    tree.logits.over_target(tree.logits.logits)[row, tree.logits.index[row, node]], wanted
                )


@pytest.mark.parametrize("name", ["chain", "static", "dynamic", "sampled"])
def test_logits_that_a_level_shares_are_recorded_for_all_its_nodes(name):
    """As in Medusa: one distribution per depth."""
    logits = torch.randn(2, 6, 11)
    depth = iter(range(6))

    def expand(tokens, parents):
        return ChildLogits(logits[:, next(depth)].unsqueeze(1), width=tokens.shape[1])

    tree = grown(RecordDraftLogits(PLANS[name]), expand, 2, 11)
    for row in range(2):
        for node in inner_nodes(tree, row):
            level = int(tree.topology.depth[row, node])
            assert torch.equal(
                tree.logits.over_target(tree.logits.at(torch.arange(2) * tree.num_nodes + node))[row],
                logits[row, level],
            )


def test_unused_slots_do_not_change_the_logits_of_others():
    draft = TableDraft(2, 2)
    tree = grown(RecordDraftLogits(SampledTree((3, 2))), draft, 2, 2)
    assert (tree.parents[:, 1:] < 0).any()
    for row in range(2):
        paths = paths_of(tree, row)
        for node in (n for n in inner_nodes(tree, row) if paths[n] is not None):
            assert torch.equal(
                tree.logits.over_target(tree.logits.at(torch.arange(2) * tree.num_nodes + node))[row],
                draft.logits(row, paths[node]),
            )


def test_sizes_are_those_of_the_plan():
    for plan in PLANS.values():
        recording = RecordDraftLogits(plan)
        assert (recording.num_nodes, recording.depth, recording.drafting_slots) == (
            plan.num_nodes,
            plan.depth,
            plan.drafting_slots,
        )
