"""walk() judges all nodes at once: the same distribution as going down node by node."""

import itertools

import pytest
import torch

from specheads import (
    Block,
    DraftTree,
    Exact,
    Fuzzy,
    Lenient,
    Margin,
    NoResidual,
    SampledTree,
    StaticTree,
    TopN,
    Traversal,
    Typical,
    chain,
)
from specheads.decoding.acceptance import Ensemble, LevelRule, Verdict, walk
from specheads.decoding.acceptance.rule import path_to
from specheads.decoding.probs.sampler import Sampler
from tests.reference.enumeration import Table, distance, output_probs, probs_of, step_probs

LEVEL_RULES = [
    Exact(), Lenient(0.5), NoResidual(), Ensemble(0.6), Fuzzy(0.1), Fuzzy(0.3, "tv"), Fuzzy(0.1, "tv", mode="rescue"),
    Fuzzy(0.9, "tv", mode="rescue"), Fuzzy(0.4, "top_p_kl", processed=True),
]  # fmt: skip

ALL_RULES = [*LEVEL_RULES, Block(), Traversal(), Typical(), TopN(), Margin(0.5)]


def first_near(rule, target, children):
    """The first of one node's children that a fuzzy rule may keep whatever the coins say, None elsewhere."""
    allowed = [child for child in children if target.first_allowed[0, child]]
    if not isinstance(rule, Fuzzy) or not allowed:
        return None
    distance = float(rule.distance(target)[0, target.tree.parents[0, allowed[0]]])
    return allowed[0] if distance <= rule.threshold else None


def first_accepted(rule, target, node, children):
    """The first child that its coin accepts, as published, or None where there is none; and the distribution of what
    follows where no child is accepted."""
    leniency = getattr(rule, "leniency", 1)
    whole = p = target.p_at(torch.tensor([node]))[0]  # Ensemble's: what it judges by
    drawn = None if target.tree.probs is None else target.tree.probs[0, children[0]] if children else p
    for child in children:
        x = target.tree.tokens[0, child]
        q = torch.zeros_like(p).index_fill(0, x, 1) if drawn is None else drawn
        if target.sampler.coin(float((p[x] / (leniency * q[x])).clamp(max=1))):
            return child, p
        if (p > q).any():
            p = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
        if drawn is not None:
            drawn = drawn.index_fill(0, x, 0) / drawn.index_fill(0, x, 0).sum()
    return None, whole if rule == NoResidual() else p


@pytest.mark.parametrize(
    "plan",
    [
        chain(2),
        StaticTree(((0,), (1,), (0, 0))),
        SampledTree((1, 1)),
        SampledTree((3,)),
        SampledTree((2, 1)),
        SampledTree((1, 2)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rule", LEVEL_RULES, ids=repr)
@pytest.mark.sampled(5)
def test_judging_all_nodes_at_once_and_going_down_level_by_level_give_one_distribution(rule, plan, monkeypatch):
    pairs = [(Table(3, one, holes=True), Table(3, other)) for one, other in ((1, 2), (4, 24))]
    at_once = [step_probs(*tables, plan, rule, (0, 1)) for tables in pairs]

    def level_by_level(rule, target):
        parents, node, going = target.tree.parents[0].tolist(), 0, True
        while going:
            children = [child for child, parent in enumerate(parents) if parent == node]
            near = first_near(rule, target, children)
            kept, probs = first_accepted(rule, target, node, children)
            if near is not None and (kept is None or rule.mode == "divergence"):
                kept = near
            going = kept is not None
            node = kept if going else node
        return Verdict(*path_to(target.tree, torch.tensor([node])), target.sampler.draw(probs.unsqueeze(0)))

    monkeypatch.setattr(LevelRule, "judge", level_by_level)
    for tables, probs in zip(pairs, at_once, strict=True):
        assert distance(probs, step_probs(*tables, plan, rule, (0, 1))) < 1e-12


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_where_nothing_is_drafted_a_token_is_drawn_from_the_target(rule):
    """Whatever the rule asks of a draft."""
    target = Table(3, 1)

    def run(sampler):
        return int(walk(DraftTree.root_only(torch.tensor([1])), target((0, 1)).view(1, 1, -1), rule, sampler).bonus)

    assert distance(probs_of(run), dict(enumerate(target((0, 1)).softmax(-1).tolist()))) < 1e-12


def test_the_rows_of_a_batch_are_judged_as_each_alone():
    for plan, rule in itertools.product([chain(2), StaticTree(((0,), (1,), (0, 0))), SampledTree((2, 1))], LEVEL_RULES):
        tables, prompts = (Table(2, 1), Table(2, 2)), [(0, 1), (1, 1)]
        alone = [output_probs(*tables, plan, [prompt], 2, accept=rule, steps=1) for prompt in prompts]
        both = {(*a, *b): p * q for a, p in alone[0].items() for b, q in alone[1].items()}
        assert distance(output_probs(*tables, plan, prompts, 2, accept=rule, steps=1), both) < 1e-12


NAN = torch.nan


def test_a_distribution_that_is_no_number_is_told_of_only_where_it_is_reached():
    """The root is certain of token 0: node 1 has another token, node 2 that one, and 3 is below node 1."""
    for rule, sampled in itertools.product(
        [Exact(), Lenient(0.5), Block(), Traversal(), NoResidual(), Typical()], [False, True]
    ):
        if sampled and rule == Block():
            parents, tokens = [-1, 0, 1], [3, 1, 0]
        else:
            parents, tokens = [-1, 0, 0, 1], [3, 1, 0, 0]
        certain = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
        logits = torch.stack([certain, torch.full((4,), NAN), certain, torch.full((4,), NAN)][: len(tokens)])
        if len(tokens) == 3:
            logits[2] = NAN
        probs = torch.tensor([0.4, 0.6, 0.0, 0.0]).expand(1, len(tokens), 4).clone() if sampled else None
        tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), 2, probs)
        for seed in range(20):
            sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(seed))
            verdict = walk(tree, logits.unsqueeze(0), rule, sampler)
            assert sampler.finite and int(verdict.bonus) == 0
            broken = Sampler(do_sample=True)
            walk(tree, torch.full((1, len(tokens), 4), NAN), rule, broken)
            assert not broken.finite


@pytest.mark.parametrize("gap", [690.0, 712.0, 730.0, 760.0])
@pytest.mark.parametrize("rule", [Exact(), Traversal()], ids=repr)
def test_a_sibling_drawn_from_next_to_nothing_leaves_the_distribution_as_it_is(rule, gap):
    """In float64, whose numbers end where the chances of exp(−gap) do."""

    class Fixed(Table):
        def __init__(self, logits):
            super().__init__(3, 0)
            self.logits = torch.tensor(logits, dtype=torch.float64)

        def __call__(self, prefix):
            return self.logits

    target, draft = Fixed([0.4, 0.3, 0.3]), Fixed([0.0, -gap, -torch.inf])
    target.logits = target.logits.log()
    first = {}
    for tokens, chance in step_probs(target, draft, SampledTree((2, 1)), rule, (0, 1)).items():
        first[tokens[0]] = first.get(tokens[0], 0.0) + chance
    assert distance(first, {0: 0.4, 1: 0.3, 2: 0.3}) < 1e-9
