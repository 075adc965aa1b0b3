"""walk() judges all nodes at once: the same law as going down node by node, and as where Python may not look."""

import pytest
import torch
from enumeration import Table, distance, law_of, output_law, step_law

from specheads import (
    Block,
    DraftTree,
    DynamicTree,
    Exact,
    Fuzzy,
    Lenient,
    Margin,
    SampledTree,
    StaticTree,
    TopN,
    Traversal,
    Typical,
    Unadjusted,
    chain,
)
from specheads.accept import Ensemble, LevelRule, Verdict, walk
from specheads.accept.marks import path_to

LEVEL_RULES = [
    Exact(), Lenient(0.5), Unadjusted(), Ensemble(0.6), Fuzzy(0.1), Fuzzy(0.3, "tv"), Fuzzy(0.1, "tv", mode="rescue"),
    Fuzzy(0.9, "tv", mode="rescue"), Fuzzy(0.4, "top_p_kl", processed=True),
]  # fmt: skip

ALL_RULES = [*LEVEL_RULES, Block(), Traversal(), Typical(), TopN(), Margin(0.5)]


def first_near(rule, laws, children):
    """The first of one node's children that a fuzzy rule may keep whatever the coins say, None elsewhere."""
    allowed = [child for child in children if laws.first_allowed[0, child]]
    if not isinstance(rule, Fuzzy) or not allowed:
        return None
    distance = float(rule.distance(laws, laws.tree.parents[0, allowed]))
    return allowed[0] if distance <= rule.threshold else None


def first_kept(rule, laws, node, children):
    """The first of one node's children that its coin keeps, as published, or None where there is none; and the law of
    what follows where no child is kept."""
    leniency = getattr(rule, "leniency", 1)
    whole = p = laws.p_at(torch.tensor([node]))[0]  # Ensemble's: what it judges by
    drawn = None if laws.tree.probs is None else laws.tree.probs[0, children[0]] if children else p
    for child in children:
        x = laws.tree.tokens[0, child]
        q = torch.zeros_like(p).index_fill(0, x, 1) if drawn is None else drawn
        if laws.sampler.coin(float((p[x] / (leniency * q[x])).clamp(max=1))):
            return child, p
        if (p > q).any():
            p = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
        if drawn is not None:
            drawn = drawn.index_fill(0, x, 0) / drawn.index_fill(0, x, 0).sum()
    return None, whole if rule == Unadjusted() else p


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
def test_judging_all_nodes_at_once_and_going_down_level_by_level_give_one_law(rule, plan, monkeypatch):
    pairs = [(Table(3, one, holes=True), Table(3, other)) for one, other in ((1, 2), (4, 24))]
    at_once = [step_law(*tables, plan, rule, (0, 1)) for tables in pairs]

    def level_by_level(rule, laws):
        parents, node, going = laws.tree.parents[0].tolist(), 0, True
        while going:
            children = [child for child, parent in enumerate(parents) if parent == node]
            near = first_near(rule, laws, children)
            kept, law = first_kept(rule, laws, node, children)
            if near is not None and (kept is None or rule.mode == "divergence"):
                kept = near
            going = kept is not None
            node = kept if going else node
        return Verdict(*path_to(laws.tree, torch.tensor([node])), laws.sampler.draw(law.unsqueeze(0)))

    monkeypatch.setattr(LevelRule, "judge", level_by_level)
    for tables, law in zip(pairs, at_once, strict=True):
        assert distance(law, step_law(*tables, plan, rule, (0, 1))) < 1e-12


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_where_nothing_is_drafted_a_token_is_drawn_from_the_target(rule):
    """Whatever the rule asks of a draft."""
    target = Table(3, 1)

    def run(sampler):
        return int(walk(DraftTree.root_only(torch.tensor([1])), target((0, 1)).view(1, 1, -1), rule, sampler).bonus)

    assert distance(law_of(run), dict(enumerate(target((0, 1)).softmax(-1).tolist()))) < 1e-12


@pytest.mark.parametrize("plan", [chain(2), StaticTree(((0,), (1,), (0, 0))), SampledTree((2, 1))], ids=repr)
@pytest.mark.parametrize("rule", LEVEL_RULES, ids=repr)
def test_the_rows_of_a_batch_are_judged_as_each_alone(rule, plan):
    tables, prompts = (Table(2, 1), Table(2, 2)), [(0, 1), (1, 1)]
    alone = [output_law(*tables, plan, [prompt], 2, accept=rule, steps=1) for prompt in prompts]
    both = {(*a, *b): p * q for a, p in alone[0].items() for b, q in alone[1].items()}
    assert distance(output_law(*tables, plan, prompts, 2, accept=rule, steps=1), both) < 1e-12


PLANS = [
    chain(2), StaticTree(((0,), (1,), (0, 0))), DynamicTree(4, 2, 2), SampledTree((1, 1)), SampledTree((1, 2)),
    SampledTree((2, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        (rule, plan) for rule in ALL_RULES for plan in PLANS if rule != Block() or plan not in PLANS[-2:]
    ],  # it judges chains
    ids=repr,
)
def test_what_is_done_where_python_may_not_look_at_numbers_gives_the_same_law(rule, plan, monkeypatch):
    tables = Table(2, 1), Table(2, 2)
    here = step_law(*tables, plan, rule, (0, 1))
    monkeypatch.setattr("specheads.host.reads", lambda values: False)
    assert distance(here, step_law(*tables, plan, rule, (0, 1))) < 1e-12
