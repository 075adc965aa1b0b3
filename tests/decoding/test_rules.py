"""Lossy rules against one-line references, and every rule on every tree through generate()."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from specheads import (
    Block,
    CSLeniency,
    DraftTree,
    DynamicTree,
    Ensemble,
    Exact,
    Fuzzy,
    Lenient,
    Margin,
    NoResidual,
    SampledTree,
    Sampler,
    StaticTree,
    TopN,
    Traversal,
    Typical,
    chain,
    convert,
)
from specheads.decoding.acceptance import walk
from specheads.decoding.planner.plan import RecordDraftLogits
from specheads.decoding.tree.draft_logits import DraftLogits
from tests.reference.enumeration import Table, TableDrafter, TableTarget, distance, probs_of, step_probs
from tests.support.prompts import BATCHES

V = 12


def entropy(p):
    return -sum(x * math.log(x) for x in p if x)


# Does x stand? p and q as lists.
REFERENCES = {
    Typical(): lambda p, q, x: p[x] > min(0.09, 0.3 * math.exp(-entropy(p))),
    Typical(0.3, 1.5): lambda p, q, x: p[x] > min(0.3, 1.5 * math.exp(-entropy(p))),
    TopN(3, 0.2): lambda p, q, x: x in sorted(range(V), key=lambda i: -p[i])[:3] and p[x] >= max(p) - 0.2,
    TopN(50, 0.05): lambda p, q, x: p[x] >= max(p) - 0.05,
    TopN(1): lambda p, q, x: p[x] == max(p),
    Margin(0.6): lambda p, q, x: p[x] == max(p) or p[x] == sorted(p)[-2] > 0.6 * max(p),
    Margin(1.0): lambda p, q, x: p[x] == max(p),
    CSLeniency(1): lambda p, q, x: p[x] == max(p),
    CSLeniency(3.0): lambda p, q, x: p[x] == max(p) or p[x] > q[x] / 3,
}  # fmt: skip


def single_children(num):
    """Row x drafts token x alone."""
    tokens = torch.stack([torch.zeros(num, dtype=torch.long), torch.arange(num)], 1)
    return tokens, torch.tensor([[-1, 0]]).expand(num, -1)


def test_a_token_is_accepted_where_its_formula_says_so():
    """Greedy judges by the distribution at temperature 1, sampling by the distribution it samples from."""
    for sampler, rule in itertools.product(["greedy", "warm"], REFERENCES):
        temperature = {"greedy": 1.0, "warm": 0.6}[sampler]
        processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        generator = torch.Generator().manual_seed(0)
        made = {"greedy": Sampler(), "warm": Sampler(processors, do_sample=True, generator=generator)}[sampler]
        tokens, parents = single_children(V)
        accepted = []
        for seed in range(10):
            p, q = (torch.randn(V, generator=torch.Generator().manual_seed(s)).double() for s in (seed, seed + 50))
            own, draft = ((logits / temperature).softmax(-1).tolist() for logits in (p, q))
            kept = DraftLogits(q.expand(V, 1, V), torch.zeros_like(tokens), None, V)
            for probs, logits in ((None, kept), (torch.tensor(draft).double().expand(V, 2, V), None)):
                tree = DraftTree(tokens, parents, 1, probs, logits)
                verdict = walk(tree, p.expand(V, 2, V), rule, made)
                assert (verdict.length == 2).tolist() == [REFERENCES[rule](own, draft, x) for x in range(V)]
                accepted += (verdict.length == 2).tolist()
                if sampler == "greedy":
                    assert (verdict.bonus == p.argmax()).all()
        assert 0 < sum(accepted) < len(accepted)


def test_cs_leniency_takes_q_as_1_where_the_drafter_gives_none():
    """The published review of n-grams: p > 1 / leniency."""
    p = torch.tensor([0.3, 0.45, 0.25]).log()
    tokens, parents = single_children(3)
    for leniency, accepted in ((2, [False, True, False]), (3.5, [True, True, False]), (4.5, [True, True, True])):
        verdict = walk(DraftTree(tokens, parents, 1), p.expand(3, 2, 3), CSLeniency(leniency), Sampler())
        assert (verdict.length == 2).tolist() == accepted


def test_cs_leniency_compares_with_the_drafts_distribution_at_each_depth():
    rule, accepted = CSLeniency(4), 0
    for seed in range(20):
        target, draft, prompt = Table(6, seed, scale=1), Table(6, seed + 50, scale=1), (0, 1)
        context = SimpleNamespace(history=[list(prompt)], root=torch.tensor([1]))
        tree = TableDrafter(draft).propose(context, Sampler(), RecordDraftLogits(chain(3)))
        verifier = TableTarget(target)
        verifier.rows = [[0]]
        verdict = walk(tree, verifier.verify(tree).logits, rule, Sampler())
        length = 1
        for x in tree.tokens[0, 1:].tolist():
            p, q = (table(prompt).softmax(-1) for table in (target, draft))
            if not (p[x] == p.max() or p[x] > q[x] / 4):
                break
            prompt, length = (*prompt, x), length + 1
        assert int(verdict.length) == length
        accepted += length - 1
    assert 10 < accepted < 50


# --- Which path ---


def branching():
    """0 → 1, 2, 3;  1 → 4;  2 → 5 → 6;  3 → 7 → 8, as nodes that carry their own numbers."""
    return DraftTree(torch.arange(9).unsqueeze(0), torch.tensor([[-1, 0, 0, 0, 1, 2, 5, 3, 7]]), 3)


def verdict_of(rule, probabilities):
    """probabilities: {node: {token: p}}; the rest is shared evenly."""
    probs = torch.zeros(1, 9, 20)
    for node in range(9):
        given = probabilities.get(node, {})
        probs[0, node] = (1 - sum(given.values())) / (20 - len(given))
        for token, p in given.items():
            probs[0, node, token] = p
    return walk(branching(), probs.log(), rule, Sampler())


def test_the_longest_path_of_accepted_tokens_is_kept():
    for rule in [Typical(0.1), TopN(3, 0.9), CSLeniency(9)]:
        probs = {0: {1: 0.6, 2: 0.2, 3: 0.15}, 1: {4: 0.9}, 2: {5: 0.5}, 5: {6: 0.5}, 6: {11: 0.7}, 3: {7: 0.5}}
        verdict = verdict_of(rule, probs)
        assert verdict.path[0, : verdict.length[0]].tolist() == [0, 2, 5, 6] and int(verdict.bonus) == 11
        assert verdict.path.shape == (1, 4)


def test_among_equally_long_paths_the_likeliest_is_kept():
    for rule in [Typical(0.1), TopN(3, 0.9), CSLeniency(9)]:
        probs = {0: {2: 0.2, 3: 0.4}, 2: {5: 0.9}, 5: {6: 0.9}, 3: {7: 0.5}, 7: {8: 0.6}}
        assert verdict_of(rule, probs).path.tolist() == [[0, 2, 5, 6]]  # .2 × .9 × .9 = .162 against .4 × .5 × .6 = .12
        probs[3] = {7: 0.8}
        assert verdict_of(rule, probs).path.tolist() == [[0, 3, 7, 8]]


def test_a_child_is_rejected_where_its_parent_is():
    verdict = verdict_of(Typical(0.1), {0: {9: 0.99}, 2: {5: 0.9}, 5: {6: 0.9}})
    assert verdict.length.tolist() == [1] and verdict.bonus.tolist() == [9]


def test_a_token_that_a_processor_rules_out_is_never_accepted():
    for rule, do_sample in itertools.product(
        [Typical(1e-9, 1e-9), TopN(20, 1.0), CSLeniency(1e9), Lenient(1e-9)], [False, True]
    ):
        processors = LogitsProcessorList([SuppressTokensLogitsProcessor([2, 7])])
        sampler = Sampler(processors, do_sample=do_sample, generator=torch.Generator().manual_seed(0))
        verdict = walk(branching(), torch.zeros(1, 9, 20), rule, sampler)
        assert not {2, 7} & set(verdict.path[0, : verdict.length[0]].tolist())


# --- Lenient ---


def test_a_lenient_token_is_emitted_as_often_as_the_formula_says():
    for leniency in [0.3, 0.8, 1.0]:
        target, draft = Table(4, 1), Table(4, 2)
        p, q = (table((0, 1)).softmax(-1).tolist() for table in (target, draft))
        taken = [b * min(1, a / (leniency * b)) for a, b in zip(p, q, strict=True)]
        left = [max(0, a - b) for a, b in zip(p, q, strict=True)]
        wanted = {x: taken[x] + (1 - sum(taken)) * left[x] / sum(left) for x in range(4)}
        probs = step_probs(target, draft, SampledTree((1,)), Lenient(leniency), (0, 1))
        first = {x: sum(chance for tokens, chance in probs.items() if tokens[0] == x) for x in range(4)}
        assert distance(first, wanted) < 1e-12
        assert all(first[x] <= p[x] / leniency + 1e-12 for x in range(4))


@pytest.mark.parametrize("leniency", [0.4, 1.0])
@pytest.mark.parametrize("plan", [chain(1), StaticTree(((0,), (1,)))], ids=repr)
def test_a_point_mass_is_a_one_hot_distribution(plan, leniency):
    p = [0.2, 0.1, 0.4, 0.3]
    tokens = torch.tensor([[0, 1, 3]])[:, : plan.num_nodes]
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0]])[:, : plan.num_nodes], 1)
    logits = torch.tensor(p, dtype=torch.float64).log().expand(1, plan.num_nodes, -1)

    def end(sampler):
        verdict = walk(tree, logits, Lenient(leniency), sampler)
        return int(verdict.path[0, verdict.last])

    probs = probs_of(end)
    first = 0.1 / leniency
    second = (1 - first) * (0.3 / 0.9) / leniency if plan.num_nodes == 3 else 0
    assert probs.get(1, 0) == pytest.approx(first, abs=1e-12) and probs.get(2, 0) == pytest.approx(second, abs=1e-12)


# --- Every rule, every tree, through generate() ---


RULES = {
    "exact": Exact(), "block": Block(), "traversal": Traversal(), "lenient": Lenient(0.5), "lenient 1": Lenient(1),
    "typical": Typical(), "top n": TopN(), "margin": Margin(0.5), "cs": CSLeniency(2), "fuzzy": Fuzzy(0.3),
    "rescue": Fuzzy(0.3, "top_k_kl", mode="rescue", processed=True), "rescue 0": Fuzzy(0, mode="rescue"),
    "random": Fuzzy(0.5, "random"), "no_residual": NoResidual(),
}  # fmt: skip
TREES = {
    "chain": chain(3), "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(8, 3, 3), "sampled": SampledTree((2, 2, 1)), "sampled chain": SampledTree((1, 1, 1)),
}  # fmt: skip
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}
LOSSLESS = ("exact", "block", "traversal", "lenient 1", "rescue 0")


@pytest.fixture(scope="module")
def model(base):
    torch.manual_seed(0)
    return convert(base, "eagle3", draft_vocab_size=60)


@pytest.fixture(scope="module")
def greedy(base):
    return {name: base.generate(**inputs, do_sample=False, **LENGTH) for name, inputs in BATCHES.items()}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.sampled(7)
def test_every_rule_runs_on_every_tree_and_batch(model, greedy, name, tree):
    rule = RULES[name]
    assert rule.lossless == (name in LOSSLESS)
    if (name, tree) == ("block", "sampled"):
        with pytest.raises(ValueError, match="Block"):
            model.generate(**BATCHES["one"], max_new_tokens=8, tree=TREES[tree], accept=rule)
        return
    for batch, inputs in BATCHES.items():
        options = {**inputs, "tree": TREES[tree], "accept": rule, "return_dict_in_generate": True, **LENGTH}
        out = model.generate(**options, do_sample=False)
        assert out.lossless == out.statistics()["lossless"] == rule.lossless
        if rule.lossless or name in ("lenient", "no_residual"):  # at temperature 0 their p is as one-hot as any
            assert torch.equal(out.sequences, greedy[batch])
        sampling = {"do_sample": True, "temperature": 1.2, "repetition_penalty": 1.3, "seed": 0}
        out = model.generate(**options, **sampling)
        columns = inputs["input_ids"].shape[1]
        assert out.sequences.shape[1] == columns + 8 and torch.equal(out.sequences[:, :columns], inputs["input_ids"])
    assert torch.equal(out.sequences, model.generate(**options, **sampling).sequences)


@pytest.mark.parametrize(
    "rule",
    [Typical(), TopN(), Margin(0.05), CSLeniency(20), Fuzzy(0.5), Fuzzy(0.5, mode="rescue"), Fuzzy(0.5, "random")],
    ids=repr,
)
def test_a_lossy_rule_accepts_more_than_the_exact_one(model, rule):
    options = {"max_new_tokens": 30, "do_sample": False, "tree": TREES["static"], "return_dict_in_generate": True}
    lengths = [
        model.generate(**BATCHES["ragged"], **options, accept=each, seed=0).statistics()["accepted_length"]
        for each in (rule, Exact())
    ]
    assert lengths[0] > lengths[1]


def test_scores_are_those_of_the_tokens_that_a_path_rule_kept(model):
    for name in ["typical", "traversal", "block"]:
        inputs = BATCHES["one"]
        out = model.generate(
            **inputs, max_new_tokens=9, do_sample=False, tree=chain(3), accept=RULES[name], output_scores=True,
            output_logits=True, repetition_penalty=1.2, return_dict_in_generate=True,
        )  # fmt: skip
        with torch.no_grad():
            logits = model.base(out.sequences).logits[:, inputs["input_ids"].shape[1] - 1 : -1]
        assert len(out.scores) == len(out.logits) == logits.shape[1]
        torch.testing.assert_close(torch.stack(out.logits, 1), logits, atol=1e-3, rtol=1e-4)


# --- Bad input ---


def test_bad_options_are_refused_in_one_line():
    for make, message in [
        (lambda: Typical(0), "epsilon=0 must be a probability above 0"),
        (lambda: Typical(1.2), "epsilon=1.2 must be"),
        (lambda: Typical(0.1, 0), "delta=0 must be above 0"),
        (lambda: TopN(0), "n=0 must be at least 1"),
        (lambda: TopN(3, -0.1), "margin=-0.1 must be a difference of probabilities"),
        (lambda: Margin(1.1), "ratio=1.1 must be a ratio"),
        (lambda: Lenient(0), "leniency=0 must be above 0 and at most 1"),
        (lambda: Lenient(1.5), "leniency=1.5 must be above 0 and at most 1"),
        (lambda: CSLeniency(0.5), "leniency=0.5 must be 1"),
        (lambda: Lenient(float("nan")), "leniency=nan"),
    ]:
        with pytest.raises(ValueError) as caught:
            make()
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_that_is_no_number_is_refused_by_its_name():
    for rule, options in [
        (Typical, ("epsilon", "delta")), (TopN, ("n", "margin")), (Margin, ("ratio",)), (Lenient, ("leniency",)),
        (CSLeniency, ("leniency",)), (Ensemble, ("weight",)), (Fuzzy, ("threshold", "k", "top_p", "epsilon")),
    ]:  # fmt: skip
        required = {} if rule in (Typical, TopN) else {rule.threshold_field: 1}
        for name in options:
            whole = name in ("n", "k")
            for bad in ("0.1", None, True, [0.1], *([2.5] if whole else [])):
                with pytest.raises(TypeError) as caught:
                    rule(**required | {name: bad})
                assert str(caught.value) == f"{name}={bad!r} must be a {'whole ' if whole else ''}number"
            made = rule(**required | {name: np.int64(1) if whole or rule is CSLeniency else np.float32(0.5)})
            if name in made.tensor_options:
                rule(**required | {name: torch.tensor(0.5)})
