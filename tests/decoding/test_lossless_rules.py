"""Losslessness by exact enumeration: the joint distribution of what decode() emits is the target's, to 1e-12."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch

from specheads.decoding.acceptance import Exact, Lenient, LevelRule, residual, walk
from specheads.decoding.acceptance.exact import accept_probs
from specheads.decoding.acceptance.rule import TargetProbs
from specheads.decoding.loop import decode
from specheads.decoding.planner import DynamicTree, SampledTree, StaticTree, chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from tests.reference.enumeration import Table, TableDrafter, TableTarget, distance, output_probs, probs_of, true_probs

DRAFTS = {
    "unlike": lambda v: (Table(v, 1), Table(v, 2)),
    "equal": lambda v: (Table(v, 1), Table(v, 1)),
    "with holes": lambda v: (Table(v, 1, holes=True), Table(v, 2, holes=True)),
}
STATIC = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
# plan, vocabulary, tokens, tree steps (None: all)
CASES = {
    "root only": (None, 4, 3, None),
    "chain": (chain(1), 4, 3, None),
    "longer chain": (chain(3), 3, 4, None),
    "static tree": (STATIC, 3, 4, None),
    "dynamic tree": (DynamicTree(budget=5, depth=3, top_k=2), 3, 4, None),
    "sampled chain": (SampledTree((1,)), 3, 3, None),
    "sampled chain of 2": (SampledTree((1, 1)), 2, 3, None),
    "sampled chain of 2, once": (SampledTree((1, 1)), 3, 4, 1),
    "2 sampled children": (SampledTree((2,)), 2, 3, None),
    "2 of 3 sampled children": (SampledTree((2,)), 3, 3, 1),
    "3 of 3 sampled children": (SampledTree((3,)), 3, 3, 1),
    "more branches than tokens": (SampledTree((3,)), 2, 3, None),
    "sampled tree": (SampledTree((2, 1)), 3, 4, 1),
    "sampled tree of 2 tokens": (SampledTree((2, 2)), 2, 4, 1),
}


def test_exact_rule_reproduces_p():
    for drafts, case in itertools.product(DRAFTS, CASES):
        plan, vocab_size, length, steps = CASES[case]
        target, draft = DRAFTS[drafts](vocab_size)
        probs = output_probs(target, draft, plan, [(0, 1)], length, steps=steps)
        assert distance(probs, true_probs(target, [(0, 1)], length)) < 1e-12


def test_exact_rule_reproduces_p_in_every_row():
    """Two rows of unlike prompts: the joint distribution is the product, so nothing leaks from row to row."""
    for plan, length in [(None, 3), (chain(2), 3), (STATIC, 2), (SampledTree((1,)), 2), (SampledTree((2,)), 2)]:
        target, draft = Table(2, 5), Table(2, 6)
        prompts = [(1,), (0, 1, 1)]
        probs = output_probs(target, draft, plan, prompts, length)
        assert distance(probs, true_probs(target, prompts, length)) < 1e-12


def test_exact_rule_reproduces_p_up_to_eos():
    for plan in [None, chain(2), STATIC, SampledTree((1,)), SampledTree((1, 1))]:
        target, draft = Table(2, 7), Table(2, 8)
        probs = output_probs(target, draft, plan, [(1,)], 3, eos=0)
        assert {len(rows[0]) for rows in probs} == {1, 2, 3}
        assert distance(probs, true_probs(target, [(1,)], 3, eos=0)) < 1e-12


def test_a_row_that_ended_leaves_the_others_their_distribution():
    target, draft = Table(2, 7), Table(2, 8)
    prompts = [(1,), (0, 1)]
    probs = output_probs(target, draft, chain(2), prompts, 3, eos=0)
    assert distance(probs, true_probs(target, prompts, 3, eos=0)) < 1e-12


def test_a_row_that_ended_stays_where_it_is():
    """Or it would outgrow the cache and the position tables while the others continue."""
    target = TableTarget(Table(5, 1))
    drafter = TableDrafter(Table(5, 1))
    ids = torch.tensor([[1, 2], [3, 4]])
    made = decode(
        target, drafter, ids, torch.tensor([2, 2]), plan=chain(2), sampler=Sampler(), accept=Exact(),
        stop=lambda row, history, count: count if len(history) > (6, 20)[row] else -1, max_new_tokens=20,
    )  # fmt: skip
    lengths = [(len(target.rows[0]), bool(step.tokens[0])) for step in made]
    ended = next(i for i, (_, going) in enumerate(lengths) if not going)
    assert len({length for length, _ in lengths[ended:]}) == 1 and len(lengths) > ended + 3


@pytest.mark.parametrize("plan", [SampledTree((2,)), SampledTree((2, 1))], ids=repr)
def test_sampled_trees_are_lossless_as_point_masses_too(plan):
    """The draft's coins are not the target's, so q may always be dropped."""
    target, draft = Table(3, 1), Table(3, 2)
    probs = output_probs(
        target,
        draft,
        plan,
        [(0, 1)],
        3,
        steps=1,
        change=lambda tree: DraftTree(tree.tokens, tree.parents, tree.max_depth),
    )
    assert distance(probs, true_probs(target, [(0, 1)], 3)) < 1e-12


# --- The enumeration notices a broken rule ---


@dataclass(frozen=True)
class Scalar(LevelRule):
    """The exact rule for sampled children once more, for one row in plain Python, with parts that can be left out."""

    lossless: bool = field(default=True, init=False)
    subtract_q: bool = True
    drop_x: bool = True

    def _judged(self, target, row, node):
        """{child: its chance to be accepted after the earlier siblings were rejected}, and what is left of p."""
        p, chances = target.p[row, node].tolist(), {}
        children = [i for i, above in enumerate(target.tree.parents[row].tolist()) if above == node]
        q = target.tree.probs[row, children[0]].tolist() if children else None
        for node in children:
            x = int(target.tree.tokens[row, node])
            chances[node] = min(1.0, p[x] / q[x])
            if self.subtract_q:
                excess = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                p = [value / sum(excess) for value in excess] if sum(excess) else p
            if self.drop_x:
                rest = [0.0 if i == x else value for i, value in enumerate(q)]
                q = [value / (sum(rest) or 1.0) for value in rest]
        return chances, p

    def accept_mask(self, target):
        made = torch.zeros(target.tree.tokens.shape, dtype=torch.float64)
        for row in range(len(made)):
            for above in range(target.tree.num_nodes):
                for node, chance in self._judged(target, row, above)[0].items():
                    made[row, node] = chance
        return target.sampler.bernoulli(made)

    def bonus_weights(self, target, node):
        rows = [self._judged(target, row, i)[1] for row, i in enumerate(node.tolist())]
        return torch.tensor(rows, dtype=torch.float64)


def test_the_rule_written_twice_agrees():
    for plan in [SampledTree((2,)), SampledTree((2, 1)), SampledTree((3,))]:
        target, draft = Table(3, 1), Table(3, 2)
        both = [output_probs(target, draft, plan, [(0, 1)], 3, steps=1, accept=rule) for rule in (Exact(), Scalar())]
        assert distance(*both) < 1e-12


def test_enumeration_notices_a_broken_rule():
    for broken, plan in [
        (Scalar(subtract_q=False), SampledTree((1,))),
        (Scalar(subtract_q=False), SampledTree((2,))),
        (Scalar(drop_x=False), SampledTree((2,))),
    ]:
        target, draft = Table(3, 1), Table(3, 2)
        probs = output_probs(target, draft, plan, [(0, 1)], 3, steps=1, accept=broken)
        assert distance(probs, true_probs(target, [(0, 1)], 3)) > 1e-3


def test_enumeration_notices_a_residual_that_returns_p(monkeypatch):
    monkeypatch.setattr("specheads.decoding.acceptance.exact.residual", lambda p, q: p)
    target, draft = Table(3, 1), Table(3, 2)
    probs = output_probs(target, draft, SampledTree((1,)), [(0, 1)], 3)
    assert distance(probs, true_probs(target, [(0, 1)], 3)) > 1e-3


@pytest.mark.parametrize("plan", [SampledTree((1,)), SampledTree((2,))], ids=repr)
def test_enumeration_notices_a_wrong_q(plan):
    target, draft = Table(3, 1), Table(3, 2)

    def flatten(tree):
        return replace(tree, probs=torch.full_like(tree.probs, 1 / 3))

    probs = output_probs(target, draft, plan, [(0, 1)], 3, steps=1, change=flatten)
    assert distance(probs, true_probs(target, [(0, 1)], 3)) > 1e-3


def test_enumeration_notices_a_draft_in_place_of_the_target():
    class AcceptAll(LevelRule):
        lossless = True

        def accept_mask(self, target):
            return target.tree.topology.drafted

        def bonus_weights(self, target, node):
            return Exact().bonus_weights(target, node)

    target, draft = Table(3, 1), Table(3, 2)
    probs = output_probs(target, draft, chain(1), [(0, 1)], 3, accept=AcceptAll())
    assert distance(probs, true_probs(target, [(0, 1)], 3)) > 1e-3


# --- How much is accepted ---


def level(num_children, q=None):
    """A root with children 0, 1 … of tokens 0, 1 …"""
    tokens = torch.tensor([[0, *range(num_children)]])
    parents = torch.tensor([[-1] + [0] * num_children])
    probs = None if q is None else q.expand(1, num_children + 1, -1)
    return DraftTree(tokens, parents, 1, probs)


def test_point_mass_children_are_accepted_with_their_share_of_p():
    p = torch.tensor([0.5, 0.2, 0.25, 0.05], dtype=torch.float64)
    logits = p.log().expand(1, 4, -1)
    probs = probs_of(lambda sampler: int(walk(level(3), logits, Exact(), sampler).length))
    assert probs[2] == pytest.approx(0.95, abs=1e-12)


def test_a_sampled_child_is_accepted_with_chance_sum_of_min():
    p = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    q = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)

    def run(sampler):
        drawn = sampler.draw(q.unsqueeze(0))
        tree = DraftTree(torch.stack([torch.tensor([0]), drawn], 1), torch.tensor([[-1, 0]]), 1, q.expand(1, 2, -1))
        return int(walk(tree, p.log().expand(1, 2, -1), Exact(), sampler).length)

    assert probs_of(run)[2] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


def test_residual_is_what_p_has_beyond_q():
    p, q = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.9, 0.0]]), torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.9, 0.0]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.3, 0.0, 0.2], [0.1, 0.9, 0.0]]))


def test_what_three_rejected_siblings_leave_completes_the_distribution():
    """Over six tokens, so that several are left after the last of them."""
    for accept in [Exact(), Lenient(1.0)]:
        generator = torch.Generator().manual_seed(3)
        p, q = torch.rand(2, 6, generator=generator, dtype=torch.float64).pow(2).softmax(-1)
        emitted, sampler = torch.zeros_like(p), Sampler(do_sample=True)
        for drawn in itertools.permutations(range(6), 3):
            chance, left = 1.0, 1.0
            for token in drawn:
                chance, left = chance * float(q[token]) / left, left - float(q[token])
            tree = DraftTree(torch.tensor([[0, *drawn]]), torch.tensor([[-1, 0, 0, 0]]), 1, q.expand(1, 4, -1))
            target = TargetProbs(tree, p.log().expand(1, 4, -1), sampler)
            kept_chances = accept_probs(target, target.p)
            for token, kept in zip(drawn, kept_chances[0, 1:].clamp(max=1).tolist(), strict=True):
                emitted[token] += chance * kept
                chance *= 1 - kept
            rest = accept.bonus_weights(target, torch.tensor([0]))[0]
            emitted += chance * rest / rest.sum()
        torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)


# --- walk() ---


def greedy_logits(tree, wanted, vocab_size=10):
    """Logits (B, N, V) whose best token after node i of row b is wanted[b][i]."""
    return torch.nn.functional.one_hot(torch.tensor(wanted), vocab_size).float()


def test_walk_descends_as_far_as_each_row_agrees():
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]]).expand(4, -1)
    tokens = torch.tensor([[3, 5, 6, 7, 8, 9]]).expand(4, -1)
    tree = DraftTree(tokens, parents, 3)
    wanted = [
        [6, 1, 8, 1, 9, 4],  # 3 → 6 → 8 → 9, bonus 4: to the leaf, by the second child
        [5, 2, 8, 1, 9, 4],  # 3 → 5, bonus 2
        [1, 7, 8, 1, 9, 4],  # nothing, bonus 1
        [7, 7, 8, 1, 9, 4],  # 7 is drafted, but not as a child of the root
    ]
    verdict = walk(tree, greedy_logits(tree, wanted), Exact(), Sampler(), keep_scores=True)
    assert verdict.length.tolist() == [4, 2, 1, 1]
    assert verdict.bonus.tolist() == [4, 2, 1, 7]
    kept = [row[:n] for row, n in zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)]
    assert kept == [[0, 2, 4, 5], [0, 1], [0], [0]]
    assert verdict.path.shape == (4, 4)
    assert [[int(raw[b].argmax()) for raw, _ in verdict.scores[:n]] for b, n in enumerate([4, 2, 1, 1])] == [
        [6, 8, 9, 4], [5, 2], [1], [7]
    ]  # fmt: skip


def test_an_unused_slot_is_never_entered():
    tree = DraftTree(torch.tensor([[3, 5, 5]]), torch.tensor([[-1, -1, 1]]), 2)
    verdict = walk(tree, greedy_logits(tree, [[5, 5, 5]]), Exact(), Sampler())
    assert verdict.length.tolist() == [1] and verdict.bonus.tolist() == [5]


def test_greedy_decoding_keeps_a_sampled_child_exactly_where_it_is_the_best_token():
    q = torch.tensor([[0.6, 0.3, 0.1]])
    for best in range(3):
        for num_children in (1, 2, 3):
            logits = torch.nn.functional.one_hot(torch.tensor([[best] * (num_children + 1)]), 3).float() * 3
            verdict = walk(level(num_children, q), logits, Exact(), Sampler())
            assert int(verdict.length) == (2 if best < num_children else 1)
            assert int(verdict.bonus if best >= num_children else verdict.path[0, 1] - 1) == best
