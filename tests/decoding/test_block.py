"""Block and Traversal: lossless by enumeration to 1e-12, and more is accepted than token by token, by closed forms."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specheads.decoding.acceptance import Acceptance, Block, Exact, Traversal, Verdict, walk
from specheads.decoding.acceptance.rule import path_to
from specheads.decoding.planner import DynamicTree, SampledTree, StaticTree, chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from tests.reference.enumeration import (
    Table,
    TableDrafter,
    TableTarget,
    distance,
    extend_outcomes,
    mean_accepted,
    output_probs,
    probs_of,
    step_probs,
    true_probs,
)

DRAFTS = {
    "unlike": lambda v: (Table(v, 1), Table(v, 2)),
    "near": lambda v: (Table(v, 1, scale=0.3), Table(v, 2, scale=0.3)),
    "equal": lambda v: (Table(v, 1), Table(v, 1)),
    "with holes": lambda v: (Table(v, 1, holes=True), Table(v, 2, holes=True)),
}
CHAINS = {"1 of 4": (SampledTree((1,)), 4), "2 of 3": (SampledTree((1, 1)), 3), "3 of 2": (SampledTree((1, 1, 1)), 2)}
TREES = {
    "2 children of 3": (SampledTree((2,)), 3),
    "all of 3": (SampledTree((3,)), 3),
    "more than there are": (SampledTree((3,)), 2),
    "2 children, one below each": (SampledTree((2, 1)), 3),
    "one child, 2 below": (SampledTree((1, 2)), 3),
    "2 and 2": (SampledTree((2, 2)), 2),
    "2, 1 and 1": (SampledTree((2, 1, 1)), 2),
    "one below a slot left empty": (SampledTree((3, 1)), 2),
}
PROMPT = (0, 1)


def error(rule, case, tables, **options):
    """How far one step's distribution, continued by the target's, is from the target's."""
    plan, length = case[0], case[0].depth + 1
    probs = step_probs(*tables, plan, rule, PROMPT, **options)
    return distance(extend_outcomes(probs, tables[0], PROMPT, length), tables[0].joint(PROMPT, length))


# --- Lossless ---


def test_a_sampled_chain_has_the_targets_distribution():
    for drafts, case, rule in itertools.product(DRAFTS, CHAINS, [Block(), Traversal()]):
        assert error(rule, CHAINS[case], DRAFTS[drafts](CHAINS[case][1])) < 1e-12


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("case", TREES)
@pytest.mark.sampled(3)
def test_a_sampled_tree_has_the_targets_distribution(case, drafts):
    assert error(Traversal(), TREES[case], DRAFTS[drafts](TREES[case][1])) < 1e-12


def test_whole_decoding_has_the_targets_joint_distribution():
    """Through decode(), step after step; a point mass is walked."""
    for rule, plan in itertools.product(
        [Block(), Traversal()],
        [chain(2), StaticTree(((0,), (1,), (0, 0))), DynamicTree(4, 2, 2), SampledTree((1, 1)), SampledTree((1,))],
    ):
        target, draft = Table(2, 3), Table(2, 4)
        probs = output_probs(target, draft, plan, [PROMPT], 3, accept=rule)
        assert distance(probs, true_probs(target, [PROMPT], 3)) < 1e-12


def test_each_row_of_a_batch_has_its_own_distribution():
    for rule, plan in [
        (Block(), SampledTree((1,))),
        (Traversal(), SampledTree((1,))),
        (Traversal(), SampledTree((2,))),
    ]:
        target, draft = Table(2, 5), Table(2, 6)
        prompts = [(1,), (0, 1, 1)]
        probs = output_probs(target, draft, plan, prompts, 2, accept=rule)
        assert distance(probs, true_probs(target, prompts, 2)) < 1e-12


def test_rows_that_go_separate_ways_through_unlike_trees_keep_their_distributions():
    """Two rows whose trees have other shapes, the second with a slot unused: the joint distribution is the product."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.2], [0.3, 0.4, 0.3]], dtype=torch.float64)
    parents = torch.tensor([[-1, 0, 0], [-1, 0, -1]])

    def run(sampler, rows=(0, 1)):
        rows = list(rows)
        first = sampler.draw(q[rows])
        second = sampler.draw(q[rows].scatter(1, first.unsqueeze(1), 0))
        tokens = torch.stack([torch.zeros_like(first), first, second], 1)
        tree = DraftTree(tokens, parents[rows], 1, q[rows].unsqueeze(1).expand(-1, 3, -1))
        verdict = walk(tree, p[rows].log().unsqueeze(1).expand(-1, 3, -1), Traversal(), sampler)
        return tuple(
            (*tree.tokens[i, verdict.path[i, 1 : verdict.length[i]]].tolist(), int(verdict.bonus[i]))
            for i in range(len(rows))
        )

    both, alone = probs_of(run), [probs_of(lambda sampler, row=row: run(sampler, (row,))) for row in (0, 1)]
    product = {(*a, *b): x * y for a, x in alone[0].items() for b, y in alone[1].items()}
    assert distance(both, product) < 1e-12
    for row in (0, 1):
        first = {t: sum(x for (tokens,), x in alone[row].items() if tokens[0] == t) for t in range(3)}
        assert distance(first, dict(enumerate(p[row].tolist()))) < 1e-12


class Echo(LogitsProcessor):
    """Rules out the last token of the prefix, and favours token 0 the more, the longer the prefix."""

    def __call__(self, input_ids, scores):
        assert not (input_ids[:, 3:] == input_ids[:, 2:-1]).any(), "shown a prefix that it had ruled out"
        bias = torch.zeros_like(scores)
        bias[:, 0] = 0.3 * input_ids.shape[1]
        return (scores + bias).scatter(1, input_ids[:, -1:], -torch.inf)


class Echoed(Table):
    """The table under Echo."""

    def __call__(self, prefix):
        scores = super().__call__(prefix).unsqueeze(0)
        return scores if len(prefix) < 2 else Echo()(torch.tensor([prefix]), scores)[0]


def test_a_processor_that_depends_on_the_prefix_sees_each_nodes_own():
    for rule, plan in [
        (Block(), SampledTree((1, 1))),
        (Traversal(), SampledTree((1, 1))),
        (Traversal(), SampledTree((2, 1))),
    ]:
        target = Table(3, 1)
        probs = step_probs(target, Table(3, 2), plan, rule, PROMPT, processors=LogitsProcessorList([Echo()]))
        wanted = Echoed(3, 1)
        assert distance(extend_outcomes(probs, wanted, PROMPT, 3), wanted.joint(PROMPT, 3)) < 1e-12


# --- The enumeration notices a broken rule ---


@dataclass(frozen=True)
class Recursive(Acceptance):
    """Traversal once more, for one row, by recursion over plain lists, with parts that can be left out."""

    subtract_q: bool = True
    drop_x: bool = True
    rescale: bool = True
    lossless = True

    def judge(self, target):
        tree, sampler, tokens = target.tree, target.sampler, target.tree.tokens[0].tolist()
        p, parents = target.p[0].tolist(), tree.parents[0].tolist()

        def visit(node, reached):
            """(the accepted node, the distribution after it), or None."""
            own, q = p[node], None
            for child in [i for i, parent in enumerate(parents) if parent == node]:
                q = tree.probs[0, child].tolist() if q is None else q
                x = tokens[child]
                found = visit(child, min(1.0, reached * own[x] / q[x]))
                if found:
                    return found
                left = [max(reached * a - b, 0.0) for a, b in zip(own, q, strict=True)]
                if sum(left):
                    own = [value / sum(left) for value in left] if self.subtract_q else own
                    reached = sum(left) / (sum(left) + (1 - reached)) if self.rescale else reached
                elif reached < 1:
                    reached = 0.0
                if self.drop_x:
                    rest = [0.0 if i == x else value for i, value in enumerate(q)]
                    q = [value / (sum(rest) or 1.0) for value in rest]
            return (node, own) if sampler.coin(reached) else None

        node, probs = visit(0, 1.0)
        bonus = sampler.draw(torch.tensor([probs], dtype=torch.float64))
        return Verdict(*path_to(tree, torch.tensor([node])), bonus)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("case", TREES)
@pytest.mark.sampled(5)
def test_the_rule_written_twice_agrees(case, drafts):
    plan, vocab_size = TREES[case]
    tables = DRAFTS[drafts](vocab_size)
    both = [step_probs(*tables, plan, rule, PROMPT) for rule in (Traversal(), Recursive())]
    assert distance(*both) < 1e-12


def test_enumeration_notices_a_broken_rule():
    for broken, case in [
        (Recursive(subtract_q=False), CHAINS["1 of 4"]),
        (Recursive(subtract_q=False), TREES["2 children of 3"]),
        (Recursive(rescale=False), CHAINS["2 of 3"]),
        (Recursive(rescale=False), TREES["2 children, one below each"]),
        (Recursive(drop_x=False), TREES["2 children of 3"]),
    ]:
        assert error(broken, case, DRAFTS["unlike"](case[1])) > 1e-3


@pytest.mark.parametrize("name", ["block.stop_prob", "traversal.stop_norm"])
def test_enumeration_notices_a_stop_that_forgets_what_was_reached(monkeypatch, name):
    made = (lambda left, reached: reached) if name.startswith("block") else (lambda left, reached: left + 0.5)
    monkeypatch.setattr(f"specheads.decoding.acceptance.{name}", made)
    rule, case = (
        (Block(), CHAINS["2 of 3"]) if name.startswith("block") else (Traversal(), TREES["2 children, one below each"])
    )
    assert error(rule, case, DRAFTS["unlike"](3)) > 1e-3


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_enumeration_notices_a_residual_that_returns_p(monkeypatch, name):
    if name == "block":
        monkeypatch.setattr("specheads.decoding.acceptance.block.residual", lambda p, q: p)
    else:
        monkeypatch.setattr(
            "specheads.decoding.acceptance.traversal.positive_part", lambda p, q: (p, p.sum(-1, keepdim=True))
        )
    rule, case = (Block(), CHAINS["2 of 3"]) if name == "block" else (Traversal(), TREES["2 children, one below each"])
    assert error(rule, case, DRAFTS["unlike"](3)) > 1e-3


@pytest.mark.parametrize("rule", [Block(), Traversal()], ids=repr)
def test_enumeration_notices_a_wrong_q(rule):
    def flat(tree):
        return replace(tree, probs=torch.full_like(tree.probs, 1 / 3))

    assert error(rule, CHAINS["2 of 3"], DRAFTS["unlike"](3), change=flat) > 1e-3


# --- How much is accepted ---


def paths_of(draft, length, vocab_size):
    """Of each path of `length` drafted tokens: itself, and per token its prefix and itself."""
    for path in itertools.product(range(vocab_size), repeat=length):
        yield path, [((*PROMPT, *path[:i]), token) for i, token in enumerate(path)]


def closed_form(target, draft, length, vocab_size, *, block):
    """Σᵢ E_q[Pᵢ], with Pᵢ = min(1, Pᵢ₋₁ p/q) for blocks and the product of min(1, p/q) token by token."""
    mean = 0.0
    for depth in range(1, length + 1):
        for _, steps in paths_of(draft, depth, vocab_size):
            chance, reached = 1.0, 1.0
            for prefix, token in steps:
                p, q = (float(table(prefix).softmax(-1)[token]) for table in (target, draft))
                chance *= q
                reached = min(1.0, reached * p / q) if block else reached * min(1.0, p / q)
            mean += chance * reached
    return mean


def test_block_accepts_its_closed_form_and_more_than_token_by_token():
    for seed, (length, vocab_size) in itertools.product(range(4), [(2, 3), (3, 2)]):
        target, draft = Table(vocab_size, seed), Table(vocab_size, seed + 50)
        plan = SampledTree((1,) * length)
        block, token = (mean_accepted(step_probs(target, draft, plan, rule, PROMPT)) for rule in (Block(), Exact()))
        assert block == pytest.approx(closed_form(target, draft, length, vocab_size, block=True), abs=1e-12)
        assert token == pytest.approx(closed_form(target, draft, length, vocab_size, block=False), abs=1e-12)
        assert block > token + 1e-4


class Constant(Table):
    """One distribution after every prefix."""

    def __init__(self, probs):
        super().__init__(len(probs), 0)
        self.logits = torch.tensor(probs, dtype=torch.float64).log()

    def __call__(self, prefix):
        return self.logits


def test_the_papers_example_accepts_11_ninths_in_place_of_10():
    """arXiv:2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), a chain of 2."""
    target, draft, plan = Constant((1 / 3, 2 / 3)), Constant((2 / 3, 1 / 3)), SampledTree((1, 1))
    assert mean_accepted(step_probs(target, draft, plan, Exact(), PROMPT)) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(step_probs(target, draft, plan, Block(), PROMPT)) == pytest.approx(11 / 9, abs=1e-12)


def test_traversal_of_a_chain_is_block():
    for drafts, case in itertools.product(DRAFTS, CHAINS):
        plan, vocab_size = CHAINS[case]
        tables = DRAFTS[drafts](vocab_size)
        assert distance(*(step_probs(*tables, plan, rule, PROMPT) for rule in (Traversal(), Block()))) < 1e-12


def test_traversal_accepts_as_much_as_token_by_token_at_least():
    for seed, (plan, vocab_size) in itertools.product(
        range(2), [(SampledTree((2,)), 3), (SampledTree((1, 2)), 3), (SampledTree((2, 1)), 2)]
    ):
        tables = Table(vocab_size, seed), Table(vocab_size, seed + 50)
        means = [mean_accepted(step_probs(*tables, plan, rule, PROMPT)) for rule in (Traversal(), Exact())]
        # On one level both are the same test; deeper, Traversal gains.
        assert means[0] > means[1] + 1e-4 if plan.depth > 1 else means[0] == pytest.approx(means[1], abs=1e-12)


# --- Temperature 0, and what is refused ---


def test_at_temperature_0_the_path_is_the_one_exact_keeps():
    for rule, plan in [(Block(), SampledTree((1, 1, 1))), (Traversal(), SampledTree((3, 2, 1)))]:
        accepted = 0
        for seed in range(20):
            target, draft = Table(5, seed, scale=3), Table(5, seed if seed % 4 else seed + 50, scale=3)
            context = SimpleNamespace(history=[[0, 1], [3]], root=torch.tensor([1, 3]))
            tree = TableDrafter(draft).propose(context, Sampler(do_sample=True, generator=torch.Generator()), plan)
            verifier = TableTarget(target)
            verifier.rows = [[0], []]
            logits = verifier.verify(tree).logits
            own, exact = (walk(tree, logits, each, Sampler()) for each in (rule, Exact()))
            assert own.length.tolist() == exact.length.tolist() and own.bonus.tolist() == exact.bonus.tolist()
            for row, length in enumerate(own.length.tolist()):
                assert own.path[row, :length].tolist() == exact.path[row, :length].tolist()
                accepted += length - 1
        assert accepted > 20


def test_block_refuses_a_sampled_tree_that_branches():
    with pytest.raises(ValueError, match=r"Block judges chains.*Traversal\(\)"):
        step_probs(Table(3, 1), Table(3, 2), SampledTree((2,)), Block(), PROMPT)
