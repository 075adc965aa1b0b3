"""Plans: every tree is well formed, EAGLE-2's is EAGLE-2's."""

import itertools
import math

import pytest
import torch

from specheads.decoding.planner import (
    BestFirstTree,
    ChildLogits,
    DynamicTree,
    SampledTree,
    StaticTree,
    chain,
    default_static,
)
from specheads.decoding.probs.sampler import Sampler


class TableDraft:
    """Draft logits by row and path, so that a reference implementation can look them up in any order."""

    def __init__(self, batch, vocab_size, *, seed=0, scale=2.0, ids=None, dtype=torch.float32):
        self.batch, self.vocab_size, self.seed, self.scale, self.ids = batch, vocab_size, seed, scale, ids
        self.dtype = dtype
        self.calls = 0

    def logits(self, row, path):
        generator = torch.Generator().manual_seed(hash((self.seed, row, *path)) % 2**31)
        return (torch.randn(self.vocab_size, generator=generator) * self.scale).to(self.dtype)

    def logprobs(self, row, path):
        """As (target id, log-probability) pairs."""
        values = self.logits(row, path).log_softmax(-1).tolist()
        ids = range(self.vocab_size) if self.ids is None else self.ids
        return dict(zip(ids, values, strict=True))

    def __call__(self, tokens, parents):
        if parents is None:
            self.paths = [[()] for _ in range(self.batch)]
        else:
            above = self.paths
            self.paths = [
                [(*above[b][parent], token) for token, parent in zip(row, parents[b].tolist(), strict=True)]
                for b, row in enumerate(tokens.tolist())
            ]
        self.calls += 1
        logits = torch.stack([torch.stack([self.logits(b, p) for p in row]) for b, row in enumerate(self.paths)])
        return ChildLogits(logits, None if self.ids is None else torch.tensor(self.ids))


def paths_of(tree, row):
    """Each node's path of tokens below the root; an unreachable slot has None."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths = [()]
    for i in range(1, len(tokens)):
        above = paths[parents[i]] if parents[i] >= 0 else None
        paths.append(None if above is None else (*above, tokens[i]))
    return paths


def assert_well_formed(tree, plan):
    assert tree.num_nodes <= plan.num_nodes and tree.max_depth == plan.depth
    assert (tree.parents[:, 0] == -1).all()
    assert (tree.parents < torch.arange(tree.num_nodes)).all()
    for row in range(len(tree.tokens)):
        reachable = [path for path in paths_of(tree, row) if path is not None]
        assert len(set(reachable)) == len(reachable), "two siblings carry the same token"
        assert max(map(len, reachable)) <= tree.max_depth


def eagle2(draft, row, plan):
    """EAGLE-2 in plain Python: the paths of its tree, best first. arXiv:2406.16858."""
    candidates = {}
    beams = {(): 0.0}
    for _ in range(plan.depth):
        level = {}
        for path, score in beams.items():
            best = sorted(draft.logprobs(row, path).items(), key=lambda pair: -pair[1])[: plan.top_k]
            level |= {(*path, token): score + logp for token, logp in best}
        candidates |= level
        beams = dict(sorted(level.items(), key=lambda pair: -pair[1])[: plan.top_k])
    return sorted(candidates, key=lambda path: -candidates[path])[: plan.budget - 1]


PLANS = {
    "chain": chain(3),
    "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 2), (1, 1), (0, 2, 1), (1, 1, 0), (1, 1, 0, 0))),
    "default static": default_static(20, 4),
    "dynamic": DynamicTree(budget=12, depth=4, top_k=3),
    "dynamic, whole": DynamicTree(budget=1 + 3 + 9 + 9, depth=3, top_k=3),
    "dynamic, one beam": DynamicTree(budget=3, depth=4, top_k=1),
    "best first": BestFirstTree(budget=12, depth=4, width=3),
    "best first, whole": BestFirstTree(budget=50, depth=3, width=2),
    "best first, few beams": BestFirstTree(budget=9, depth=5, width=3, beams=2),
    "sampled": SampledTree((3, 2, 1)),
}


def best_trees(draft, row, size, depth, width):
    """The most accepted tokens that the draft expects of any tree of `size` nodes, and the expectation of each tree."""
    children = {}

    def path_prob(path):
        return math.prod(math.exp(draft.logprobs(row, path[:i])[path[i]]) for i in range(len(path)))

    def children_of(path):
        if path not in children:
            ranked = sorted(draft.logprobs(row, path).items(), key=lambda pair: -pair[1])[:width]
            children[path] = [(*path, token) for token, _ in ranked] if len(path) < depth else []
        return children[path]

    trees = {frozenset()}
    for _ in range(size):
        trees |= {
            tree | {child} for tree in trees for path in ((), *tree) for child in children_of(path) if child not in tree
        }
    worth = {tree: sum(map(path_prob, tree)) for tree in trees}
    return max(worth.values()), worth


def test_a_best_first_tree_is_the_best_of_all_trees_of_its_size():
    for scale, (size, depth, width) in itertools.product(
        [0.3, 1.0, 3.0], [(1, 3, 2), (4, 4, 2), (5, 2, 3), (5, 5, 3), (6, 3, 2)]
    ):
        draft, plan = TableDraft(2, 4, seed=size, scale=scale), BestFirstTree(size + 1, depth, width)
        tree = plan.grow(torch.zeros(2, dtype=torch.long), draft, Sampler(), 4)
        assert tree.num_nodes == plan.num_nodes and draft.calls <= depth
        for row in range(2):
            most, worth = best_trees(draft, row, size, depth, width)
            assert worth[frozenset(paths_of(tree, row)[1:])] == pytest.approx(most, rel=1e-6)


def test_a_best_first_tree_expands_no_more_nodes_than_it_states():
    draft, seen = TableDraft(1, 9), []

    def expand(tokens, parents):
        seen.append(tokens.shape[1])
        return draft(tokens, parents)

    for plan in (BestFirstTree(20, 4, 3), BestFirstTree(20, 6, 3, beams=4)):
        seen.clear()
        plan.grow(torch.tensor([0]), expand, Sampler(), 9)
        assert seen == [1, *plan.level_beams] and plan.drafting_slots == sum(plan.level_beams)
        assert max(seen) <= (plan.beams or 20)


def test_every_tree_is_well_formed():
    for name, batch in itertools.product(PLANS, [1, 3]):
        draft = TableDraft(batch, 11, seed=batch)
        sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(0))
        tree = PLANS[name].grow(torch.arange(batch), draft, sampler, 11)
        assert_well_formed(tree, PLANS[name])
        assert tree.tokens[:, 0].tolist() == list(range(batch))
        assert tree.num_nodes == PLANS[name].num_nodes


def test_dynamic_tree_is_eagle2():
    for scale, plan in itertools.product(
        [0.5, 2.0, 8.0], [DynamicTree(8, 3, 2), DynamicTree(12, 4, 4), DynamicTree(30, 5, 3), DynamicTree(2, 3, 2)]
    ):
        draft = TableDraft(4, 9, seed=int(10 * scale), scale=scale)
        tree = plan.grow(torch.zeros(4, dtype=torch.long), draft, Sampler(), 9)
        assert_well_formed(tree, plan)
        for row in range(4):
            assert set(paths_of(tree, row)[1:]) == set(eagle2(draft, row, plan))


def test_dynamic_tree_through_a_draft_vocabulary_is_eagle2():
    draft = TableDraft(2, 5, ids=[3, 4, 8, 20, 31])
    plan = DynamicTree(10, 3, 4)
    tree = plan.grow(torch.zeros(2, dtype=torch.long), draft, Sampler(), 40)
    assert_well_formed(tree, plan)
    for row in range(2):
        assert set(paths_of(tree, row)[1:]) == set(eagle2(draft, row, plan))


def test_dynamic_tree_of_a_vocabulary_narrower_than_top_k():
    draft, plan = TableDraft(2, 3), DynamicTree(40, 3, 5)
    tree = plan.grow(torch.zeros(2, dtype=torch.long), draft, Sampler(), 3)
    assert_well_formed(tree, plan)
    assert tree.num_nodes == 1 + 3 + 9 + 5 * 3  # five beams, of three children each


@pytest.mark.parametrize("scale", [30.0, 300.0, 3000.0])
def test_no_parent_is_missing_where_probabilities_round_to_1(scale):
    """A child then ties with its parent, at scores from 0 to thousands below."""
    for seed in range(10):
        draft = TableDraft(4, 9, seed=seed, scale=scale)
        for budget in (3, 6, 11, 17):
            for plan in (DynamicTree(budget, 5, 3), BestFirstTree(budget, min(5, budget - 1), 3)):
                tree = plan.grow(torch.zeros(4, dtype=torch.long), draft, Sampler(), 9)
                assert_well_formed(tree, plan)
                assert (tree.parents[:, 1:] >= 0).all()
                for row in range(4):
                    nodes = paths_of(tree, row)
                    # With a parent lost or renumbered wrongly, a token would follow a path that never drafted it.
                    for path in nodes[1:]:
                        best = sorted(draft.logprobs(row, path[:-1]).items(), key=lambda pair: -pair[1])[:3]
                        assert path[:-1] in nodes and path[-1] in dict(best)


def test_static_tree_holds_the_ranked_tokens():
    plan = PLANS["static"]
    draft = TableDraft(2, 7)
    tree = plan.grow(torch.tensor([1, 2]), draft, Sampler(), 7)
    for row in range(2):
        for choice, path in zip(plan.choices, paths_of(tree, row)[1:], strict=True):
            ranked = sorted(draft.logprobs(row, path[:-1]).items(), key=lambda pair: -pair[1])
            assert len(path) == len(choice) and path[-1] == ranked[choice[-1]][0]
    assert draft.calls == plan.depth
    assert plan.drafting_slots == sum(len(c) < 4 and any(d[:-1] == c for d in plan.choices) for c in plan.choices)


def test_a_chain_is_the_greedy_draft():
    draft = TableDraft(1, 7)
    tree = chain(4).grow(torch.tensor([0]), draft, Sampler(), 7)
    path = ()
    for token in tree.tokens[0, 1:].tolist():
        assert token == max(draft.logprobs(0, path).items(), key=lambda pair: pair[1])[0]
        path = (*path, token)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


def test_an_impossible_plan_is_refused_with_the_reason():
    for make, message in [
        (lambda: StaticTree(()), "at least one choice"),
        (lambda: StaticTree(((),)), "not a path of ranks"),
        (lambda: StaticTree(((0,), (-1,))), "not a path of ranks"),
        (lambda: StaticTree(((0,), (1, 0))), r"\(1, 0\) has no parent: add \(1,\)"),
        (lambda: chain(0), "depth=0"),
        (lambda: DynamicTree(budget=1), "budget=1"),
        (lambda: DynamicTree(budget=8, depth=2, top_k=2), "budget=8 must be 2 to 7"),
        (lambda: DynamicTree(depth=0), "depth=0"),
        (lambda: DynamicTree(top_k=0), "top_k=0"),
        (lambda: BestFirstTree(budget=1), "budget=1"),
        (lambda: BestFirstTree(width=0), "width=0"),
        (lambda: BestFirstTree(beams=0), "beams=0"),
        (lambda: SampledTree(()), "at least one level"),
        (lambda: SampledTree((2, 0)), "branches=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_static_choices_are_put_in_order_once():
    assert StaticTree(((0, 0), (1,), (0,), (1,))) == StaticTree(((0,), (1,), (0, 0)))


def test_sampled_children_are_drawn_without_replacement_from_the_distribution_they_carry():
    draft, plan = TableDraft(3, 4), SampledTree((3, 2))
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(3))
    tree = plan.grow(torch.zeros(3, dtype=torch.long), draft, sampler, 4)
    assert_well_formed(tree, plan)
    assert plan.num_nodes == tree.num_nodes == 1 + 3 + 6 and plan.drafting_slots == 3
    for row in range(3):
        for i, path in enumerate(paths_of(tree, row)[1:], 1):
            torch.testing.assert_close(tree.probs[row, i], draft.logits(row, path[:-1]).softmax(-1))


def test_fewer_tokens_than_branches_leave_empty_slots_and_none_below_them():
    draft, plan = TableDraft(2, 2), SampledTree((3, 1))
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(3))
    tree = plan.grow(torch.zeros(2, dtype=torch.long), draft, sampler, 2)
    assert tree.parents.tolist() == [[-1, 0, 0, -1, 1, 2, -1]] * 2
    assert_well_formed(tree, plan)


def test_nothing_is_drafted_where_processors_rule_out_every_token():
    for ids in [None, [2, 5, 6]]:
        from transformers import LogitsProcessorList
        from transformers.generation import SuppressTokensLogitsProcessor

        ruled_out = LogitsProcessorList([SuppressTokensLogitsProcessor([2, 5, 6] if ids else [0, 1, 2])])
        draft = TableDraft(1, 3, ids=ids)
        sampler = Sampler(ruled_out, do_sample=True, generator=torch.Generator().manual_seed(3))
        tree = SampledTree((2, 1)).grow(torch.tensor([0]), draft, sampler, 8 if ids else 3)
        assert tree.parents[0, :3].tolist() == [-1, -1, -1]


def test_processors_know_drafted_tokens_by_their_target_ids():
    from transformers import LogitsProcessorList
    from transformers.generation import SuppressTokensLogitsProcessor

    # Suppressing ids 0 to 2 must not touch draft tokens 0 to 2, which are target ids 3, 4 and 7.
    sampler = Sampler(LogitsProcessorList([SuppressTokensLogitsProcessor([0, 1, 2])]), do_sample=True)
    sampler.generator = torch.Generator().manual_seed(0)
    draft = TableDraft(1, 3, ids=[3, 4, 7])
    tree = SampledTree((3,)).grow(torch.tensor([0]), draft, sampler, 9)
    assert sorted(tree.tokens[0, 1:].tolist()) == [3, 4, 7]
    torch.testing.assert_close(tree.probs[0, 1][[3, 4, 7]], draft.logits(0, ()).softmax(-1))


def test_a_rank_beyond_the_draft_vocabulary_is_refused():
    with pytest.raises(ValueError, match="rank 4 in a tree needs a draft vocabulary of 5 tokens or more, not 4"):
        StaticTree(((4,),)).grow(torch.tensor([0]), TableDraft(1, 4), Sampler(), 9)


def test_the_default_static_tree_has_the_most_probable_paths():
    accuracy = (0.6, 0.2, 0.1)
    paths = [c for d in (1, 2, 3) for c in itertools.product(range(3), repeat=d)]
    best = sorted(paths, key=lambda path: -math.prod(accuracy[rank] for rank in path))
    for size in (1, 2, 5, 9):
        assert set(default_static(size + 1, 3, accuracy).choices) == set(best[:size])
    assert default_static(3, 1, accuracy[::-1]).choices == ((1,), (2,)), "in whatever order the ranks are"
    with pytest.raises(ValueError, match="drafts nothing"):
        default_static(1, 3)
    assert default_static(1 + 3 + 9, 2, accuracy).num_nodes == 13
    assert default_static(14, 2, accuracy).num_nodes == 13, "there are no more"
    with pytest.raises(ValueError, match="99999 nodes: ask for 1024 at most"):
        default_static(99999, 6)
