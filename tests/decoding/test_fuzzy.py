"""Fuzzy acceptance: both semantics, and the drafters it refuses."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

import specheads
from specheads import DraftTree, DynamicTree, Exact, Fuzzy, SampledTree, Sampler, StaticTree, chain, convert
from specheads.decoding.acceptance import TargetProbs, walk
from specheads.decoding.acceptance.divergences import NAMES, divergence
from specheads.decoding.planner.plan import RecordDraftLogits
from specheads.decoding.tree.draft_logits import DraftLogits
from specheads.decoding.verify.causal import Target
from tests.reference.enumeration import (
    Table,
    TableDrafter,
    TableTarget,
    distance,
    mean_accepted,
    output_probs,
    step_probs,
    true_probs,
)
from tests.support.prompts import BATCHES
from tests.support.replay_drafter import Replay
from tests.support.tiny_models import tiny_llama

STATIC = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
PLANS = {"chain": chain(2), "static": STATIC, "dynamic": DynamicTree(4, 2, 2), "sampled": SampledTree((2, 1))}
PROMPT = (0, 1)
NEVER = 1e-300  # a threshold that no divergence of unlike distributions is below


# --- The distribution of the output ---


def test_rescue_at_threshold_0_has_the_distribution_of_exact():
    """0 itself takes Exact's path; the next number runs the whole rule and rescues nothing, however near p and q."""
    for scale, plan, threshold in itertools.product([0.2, 1.5], PLANS, [0, NEVER]):
        rule = Fuzzy(threshold, mode="rescue")
        assert rule.lossless == (threshold == 0) and rule.requires_draft_probs == (threshold > 0)
        tables = [Table(2 if plan == "sampled" else 3, seed, scale=scale) for seed in (1, 2)]
        both = [step_probs(*tables, PLANS[plan], accept, PROMPT) for accept in (rule, Exact())]
        assert distance(*both) < 1e-12


def test_rescue_at_threshold_0_has_the_targets_joint_distribution():
    for plan in [chain(2), SampledTree((1, 1))]:
        target = Table(2, 1)
        probs = output_probs(target, Table(2, 2), plan, [PROMPT], 3, accept=Fuzzy(NEVER, mode="rescue"))
        assert distance(probs, true_probs(target, [PROMPT], 3)) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mode", ["divergence", "rescue"])
@pytest.mark.parametrize("name", ["js", "top_k_kl"])
def test_acceptance_grows_with_the_threshold(name, mode, plan):
    tables = Table(2, 1, scale=0.8), Table(2, 2, scale=0.8)
    means = [
        mean_accepted(step_probs(*tables, PLANS[plan], Fuzzy(threshold, name, mode, k=1), PROMPT))
        for threshold in (NEVER, 0.01, 0.05, 0.2, 100)
    ]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(means)) and means[0] < means[-1] - 0.05
    if mode == "divergence" or plan == "chain":  # rescue may have gone down another branch, and met its end
        assert means[-1] == pytest.approx(PLANS[plan].depth, abs=1e-12)
    exact = mean_accepted(step_probs(*tables, PLANS[plan], Exact(), PROMPT))
    assert means[0] == pytest.approx(exact, abs=1e-12)


def test_where_no_distribution_is_near_each_token_is_drawn_from_p():
    """Divergence mode."""
    for plan in [chain(2), STATIC, SampledTree((1, 1)), SampledTree((2,))]:
        target = Table(2, 1)
        probs = output_probs(target, Table(2, 2), plan, [PROMPT], 3, accept=Fuzzy(NEVER))
        assert distance(probs, true_probs(target, [PROMPT], 3)) < 1e-12


class Published(Fuzzy):
    """As the paper's code: a rejection ends the step."""

    def accept_mask(self, target):
        return target.first_allowed & target.at_parent(self.near(self.distance(target)))

    def bonus_weights(self, target, node):
        return target.p_at(node)


def test_a_step_begins_as_the_published_one_and_continues_from_a_drawn_token():
    for plan, threshold in itertools.product(PLANS, [NEVER, 0.01, 0.05, 100]):
        tables = Table(2, 4, scale=0.8), Table(2, 5, scale=0.8)
        own, theirs = (step_probs(*tables, PLANS[plan], rule(threshold), PROMPT) for rule in (Fuzzy, Published))
        first = [
            {x: sum(p for tokens, p in probs.items() if tokens[0] == x) for x in range(2)} for probs in (own, theirs)
        ]
        assert distance(*first) < 1e-12
        if threshold == 100:
            assert distance(own, theirs) < 1e-12
        else:
            assert mean_accepted(own) > mean_accepted(theirs)


# --- Which nodes stand ---


def grown(target, draft, plan, sampler, rows=((0, 1), (3,))):
    context = SimpleNamespace(history=[list(row) for row in rows], root=torch.tensor([row[-1] for row in rows]))
    tree = TableDrafter(draft).propose(context, sampler, RecordDraftLogits(plan))
    verifier = TableTarget(target)
    verifier.rows = [list(row[:-1]) for row in rows]
    return tree, verifier.verify(tree).logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", [chain(4), StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), SampledTree((2, 2))])
def test_the_path_follows_first_children_while_the_distributions_are_near(plan, name):
    """Greedy: the correction is the target's argmax."""
    lengths = []
    for seed in range(12):
        target, draft = Table(6, seed, scale=1), Table(6, seed + 50, scale=1)
        tree, logits = grown(target, draft, plan, Sampler(do_sample=True, generator=torch.Generator()))
        threshold = (0.05, 0.25, 0.8)[seed % 3]
        verdict = walk(tree, logits, Fuzzy(threshold, name, k=3, top_p=0.7), Sampler())
        for row, prefix in enumerate([(0, 1), (3,)]):
            node, path = 0, [0]
            while children := (tree.parents[row] == node).nonzero().flatten().tolist():
                log_probs = (table(prefix).log_softmax(-1).unsqueeze(0) for table in (draft, target))
                far = float(divergence(name, *log_probs, k=3, top_p=0.7)) > threshold
                best = int(target(prefix).argmax())
                children = [child for child in children if int(tree.tokens[row, child]) == best] if far else children
                if not children:
                    break
                node = children[0]
                path.append(node)
                prefix = (*prefix, int(tree.tokens[row, node]))
            assert verdict.path[row, : verdict.length[row]].tolist() == path
            assert int(verdict.bonus[row]) == int(target(prefix).argmax())
            lengths.append(len(path))
    assert len(set(lengths)) > 1


def test_processed_compares_the_distributions_under_the_processors():
    """At a high temperature all distributions are near."""
    target, draft = Table(6, 1, scale=3), Table(6, 2, scale=3)
    hot = Sampler(LogitsProcessorList([TemperatureLogitsWarper(1e6)]))
    tree, logits = grown(target, draft, chain(3), hot)
    assert walk(tree, logits, Fuzzy(0.01), hot).length.max() < 4
    assert walk(tree, logits, Fuzzy(0.01, processed=True), hot).length.tolist() == [4, 4]


def test_which_distributions_are_compared():
    """The raw ones whatever the temperature is, and those under it where these are asked for."""
    for do_sample, temperature, name in itertools.product([True, False], [None, 2.0], NAMES):
        tables = Table(6, 1), Table(6, 2)
        processors = LogitsProcessorList([] if temperature is None else [TemperatureLogitsWarper(temperature)])
        sampler = Sampler(processors, do_sample=do_sample, generator=torch.Generator().manual_seed(0))
        tree, logits = grown(*tables, chain(2), sampler, rows=[(0, 1)])
        for processed in (False, True):
            rule = Fuzzy(0.1, name, k=3, top_p=0.7, processed=processed)
            target = TargetProbs(tree, logits, sampler)
            scores = [table((0, 1)).unsqueeze(0) / ((temperature or 1) if processed else 1) for table in tables]
            wanted = divergence(name, *(s.log_softmax(-1) for s in reversed(scores)), k=3, top_p=0.7)
            torch.testing.assert_close(rule.distance(target)[:, 0], wanted)


def test_a_distance_at_the_threshold_is_near_and_is_no_reason_for_a_rescue():
    at = torch.tensor([0.25, 0.5])
    assert Fuzzy(0.25).near(at).tolist() == [True, False]
    assert Fuzzy(0.25, mode="rescue").near(at).tolist() == [False, False]


def test_rescue_leaves_alone_what_exact_keeps():
    """The target's best token is the draft's second: exact keeps it, and only divergence mode prefers the first."""
    found = 0
    for seed in range(30):
        target, draft = Table(4, seed), Table(4, seed + 50)
        tree, logits = grown(target, draft, StaticTree(((0,), (1,))), Sampler(), rows=[(0, 1)])
        if int(target((0, 1)).argmax()) == int(tree.tokens[0, 2]):
            found += 1
            assert walk(tree, logits, Fuzzy(100, mode="rescue"), Sampler()).path[0].tolist() == [0, 2]
            assert walk(tree, logits, Fuzzy(100), Sampler()).path[0].tolist() == [0, 1]
    assert found


def test_rescue_is_not_put_off_by_a_root_that_is_likely_to_come_again():
    """The likeliest token after the root is the root's own, which is no child of it: the first child is rescued."""
    logits = torch.tensor([[[5.0, 4.0, 0.0], [5.0, 4.0, 0.0]]], dtype=torch.float64)
    tree = DraftTree(
        torch.tensor([[0, 1]]),
        torch.tensor([[-1, 0]]),
        1,
        logits=DraftLogits(logits, torch.zeros(1, 2).long(), None, 3),
    )
    assert walk(tree, logits, Exact(), Sampler()).length.tolist() == [1]
    assert walk(tree, logits, Fuzzy(0.1, mode="rescue"), Sampler()).length.tolist() == [2]


def test_a_token_that_a_processor_rules_out_is_never_accepted():
    for mode in ["divergence", "rescue"]:
        target, draft = Table(6, 1), Table(6, 2)
        tree, logits = grown(target, draft, StaticTree(((0,), (1,))), Sampler())
        banned = int(tree.tokens[0, 1])
        sampler = Sampler(LogitsProcessorList([SuppressTokensLogitsProcessor([banned])]))
        kept = walk(tree, logits, Fuzzy(100, mode=mode), sampler).path[0, 1]
        assert int(tree.tokens[0, kept]) != banned


def test_random_is_a_uniform_number_under_the_threshold_even_when_greedy():
    rule = Fuzzy(0.3, "random")
    assert not rule.requires_draft_probs
    target, draft = Table(6, 1), Table(6, 2)
    tree, logits = grown(target, draft, chain(1), Sampler(), rows=[(0, 1)] * 200)
    sampler = Sampler(generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # one a node
    wanted = drawn[:, 0] <= 0.3
    assert torch.equal(walk(tree, logits, rule, sampler).length == 2, wanted)
    for threshold, length in ((0, 1), (1, 2)):
        assert (walk(tree, logits, Fuzzy(threshold, "random"), sampler).length == length).all()


def test_a_seed_governs_random_at_temperature_0_too(base):
    torch.manual_seed(0)
    model = convert(base, "medusa", num_heads=2)
    options = {"max_new_tokens": 20, "do_sample": False, "tree": chain(2), "accept": Fuzzy(0.5, "random")}
    texts = [model.generate(**BATCHES["one"], **options, seed=seed)[0].tolist() for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


# --- Drafters ---


def test_every_head_gives_its_probs():
    for head in [("medusa", {"num_heads": 2}), ("eagle3", {"draft_vocab_size": 50}), ("eagle", {}), ("parallel", {})]:
        torch.manual_seed(0)
        model = convert(tiny_llama(eos_token_id=None), head[0], **head[1])
        plan, taken = chain(2), []
        for threshold in (0.05, 0.3, 1.0):
            options = {"max_new_tokens": 13, "do_sample": False, "return_dict_in_generate": True}
            out = model.generate(**BATCHES["ragged"], **options, tree=plan, accept=Fuzzy(threshold))
            assert out.lossless is False and out.statistics()["lossless"] is False
            taken.append(out.statistics()["accepted_length"])
        assert taken[-1] == 3  # JS is below 1 everywhere
        assert taken[0] < 3


@pytest.mark.parametrize("draft", ["lookup", "ngram", "maxgram", "auto"])
def test_a_drafter_that_gives_no_probs_is_refused_before_anything_runs(base, monkeypatch, draft):
    """Whether or not it would find something to draft in this text."""
    monkeypatch.setattr(Target, "prefill", lambda *args, **kwargs: pytest.fail("a prompt ran"))
    options = {"max_new_tokens": 9, "do_sample": False, "draft": draft, "accept": "fuzzy:js:0.2"}
    with pytest.raises(ValueError, match="gives none"):
        specheads.generate(base, torch.tensor([[5, 6, 7]]), **options)
    with pytest.raises(ValueError, match="gives none"):
        specheads.generate_many(base, [[5, 6, 7]], stream=True, **options)


def test_a_drafter_that_gives_no_probs_is_refused_by_name(base):
    model, inputs = convert(base, "medusa", num_heads=2), BATCHES["one"]
    drafter = Replay(inputs, base.generate(**inputs, do_sample=False, max_new_tokens=9))
    with pytest.raises(ValueError, match=r"Fuzzy compares draft and target .*Replay gives none"):
        model.generate(**inputs, max_new_tokens=9, draft=drafter, accept=Fuzzy(0.3))
    for rule in (Fuzzy(0, mode="rescue"), Fuzzy(0.5, "random")):
        model.generate(**inputs, max_new_tokens=9, draft=drafter, accept=rule)
    tree, logits = grown(Table(6, 1), Table(6, 2), chain(1), Sampler())
    with pytest.raises(ValueError, match="drafted without any"):
        walk(replace(tree, logits=None), logits, Fuzzy(0.3), Sampler())


def test_plain_decoding_takes_a_fuzzy_rule_as_any_other(base):
    options = {**BATCHES["one"], "do_sample": False, "max_new_tokens": 9}
    out = convert(base, "medusa").generate(**options, draft=False, accept=Fuzzy(0.3))
    assert torch.equal(out, base.generate(**options))


# --- Bad options ---


def test_bad_options_are_refused_in_one_line():
    for make, message in [
        (lambda: Fuzzy(-0.1), "threshold=-0.1 must be a divergence of 0 or more"),
        (lambda: Fuzzy(float("nan")), "threshold=nan must be"),
        (lambda: Fuzzy(0.1, "top_k_jss"), "unknown divergence 'top_k_jss'; did you mean 'top_k_js'?"),
        (lambda: Fuzzy(0.1, mode="rescued"), "unknown mode of Fuzzy 'rescued'; did you mean 'rescue'?"),
        (lambda: Fuzzy(0.1, k=0), "k=0 "),
        (lambda: Fuzzy(0.1, top_p=1.5), "top_p=1.5 "),
        (lambda: Fuzzy(0.1, warpers=("top_p",)), "warpers=('top_p',) must be names in one text"),
    ]:
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        assert message in str(caught.value) and "\n" not in str(caught.value)
