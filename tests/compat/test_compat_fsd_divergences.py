"""FSD's names for divergences: what each is, by numpy in float64 from the formulas of its code."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specheads import DraftTree, Exact, Fuzzy, Sampler, fuzzy_from
from specheads.decoding.acceptance import TargetProbs
from specheads.decoding.acceptance.divergences import divergence
from specheads.decoding.tree.draft_logits import DraftLogits

V, GAMMA = 120, 5
TEMPERATURE, TOP_K = 0.6, 60  # more than the 50 of top_k_…, among which fewer would leave ties


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def warped(logits, warpers):
    if "temperature" in warpers:
        logits = logits / TEMPERATURE
    if "top_k" in warpers:
        logits = np.where(logits < np.sort(logits)[:, -TOP_K, None], -np.inf, logits)
    return logits


def merged(p, q, k=50):
    """The target's k likeliest tokens, and all others as one."""
    best = np.argsort(-p, kind="stable")[:, :k]
    both = [np.take_along_axis(one, best, 1) for one in (p, q)]
    return [np.concatenate([one, 1 - one.sum(1, keepdims=True)], 1) for one in both]


def theirs(name, p_logits, q_logits, warpers=()):
    """(G,) the divergences of logits (G, V): their code's formulas."""
    processed = name.endswith("_processed") and "reversed" not in name
    under = ("temperature", "top_k") if processed else warpers
    p, q = (softmax(warped(logits, under)) for logits in (p_logits, q_logits))
    if under:
        p, q = ((one + 1e-10) / (one + 1e-10).sum(1, keepdims=True) for one in (p, q))
    name = name.removesuffix("_processed")
    if name.startswith("top_k_"):
        p, q = merged(p, q)
    m = (p + q) / 2

    def kl(a, b):
        return (a * np.log(a / b)).sum(1)

    return {
        "kl_div": lambda: kl(q, p),
        "kl_div_reversed": lambda: kl(p, q),
        "js_div": lambda: (kl(m, p) + kl(m, q)) / 2,
        "tv_div": lambda: np.abs(p - q).sum(1) / 2,
    }[name.removeprefix("top_k_")]()


def judged(rule, p_logits, q_logits, dtype=torch.float64):
    """(G,) the divergences that the rule compares, of logits (G, V), in a call of temperature and top-k."""
    target, draft = (torch.from_numpy(logits).to(dtype).unsqueeze(0) for logits in (p_logits, q_logits))
    parents = torch.arange(-1, GAMMA).unsqueeze(0)
    kept = DraftLogits(draft, parents.add(1).clamp(max=GAMMA - 1), None, V)
    tree = DraftTree(torch.zeros_like(parents), parents, GAMMA, logits=kept)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K)])
    sampler = Sampler(warpers, do_sample=True, generator=torch.Generator())
    target = torch.cat([target, target[:, :1]], 1)  # of the last drafted token, after which nothing is compared
    return rule.distance(TargetProbs(tree, target, sampler))[0, :GAMMA]


def logits_of_a_pair(scale, seed=0):
    random = np.random.default_rng(seed)
    p = scale * random.standard_normal((GAMMA, V))
    return p, p + 0.5 * scale * random.standard_normal((GAMMA, V))


NAMES = ("kl_div", "kl_div_reversed", "js_div", "tv_div", "top_k_kl_div", "top_k_js_div", "top_k_tv_div")
PROCESSED = ("kl_div_processed", "js_div_processed", "tv_div_processed", "kl_div_reversed_processed")


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", [*NAMES, *PROCESSED])
def test_a_name_means_what_their_code_computes(name, scale):
    pair = logits_of_a_pair(scale)
    assert judged(fuzzy_from(name, 0.4), *pair).tolist() == pytest.approx(theirs(name, *pair), rel=1e-9, abs=1e-12)
    single = judged(fuzzy_from(name, 0.4), *pair, dtype=torch.float32)
    assert single.tolist() == pytest.approx(theirs(name, *pair), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("warpers", [("temperature",), ("top_k",), ("top_k", "temperature"), "temperature, top_k"])
@pytest.mark.parametrize("name", [*NAMES, "kl_div_reversed_processed"])
def test_fsd_div_logit_processor_names_the_warpers_that_the_divergence_sees(name, warpers):
    pair = logits_of_a_pair(1.0)
    rule = fuzzy_from(name, 0.4, warpers)
    assert judged(rule, *pair).tolist() == pytest.approx(theirs(name, *pair, warpers), rel=1e-9, abs=1e-12)
    assert judged(rule, *pair).tolist() != pytest.approx(theirs(name, *pair), rel=1e-3)


def test_a_warper_that_the_call_has_not_leaves_the_raw_logits():
    pair = logits_of_a_pair(1.0)
    raw = judged(fuzzy_from("kl_div", 0.4), *pair)
    assert torch.equal(judged(fuzzy_from("kl_div", 0.4, ["top_p"]), *pair), raw)


def test_a_processed_type_is_under_all_processors_whatever_else_is_named():
    assert fuzzy_from("js_div_processed", 0.4, "top_k") == fuzzy_from("js_div_processed", 0.4)


def test_js_div_is_never_looser_than_their_codes():
    """At one threshold it lets pass what their formula does, and true JS, never above it there, more."""
    passed = {"js": 0, "js_div": 0}
    for seed in range(60):
        pair = logits_of_a_pair(1.6, seed)
        near = {name: judged(fuzzy_from(name, 0.1), *pair) <= 0.1 for name in passed}
        assert near["js_div"].tolist() == (theirs("js_div", *pair) <= 0.1).tolist()
        assert not (near["js_div"] & ~near["js"]).any()
        passed = {name: count + int(near[name].sum()) for name, count in passed.items()}
    assert 0 < passed["js_div"] < passed["js"] - 20


@pytest.mark.parametrize("name", ["kl", "js", "tv"])
def test_top_p_which_breaks_off_there_is_the_divergence_of_its_name_over_the_nucleus(name):
    p, q = logits_of_a_pair(1.0)
    rows = []
    for one, other in zip(softmax(p), softmax(q), strict=True):
        order = np.argsort(-one)
        inside = order[: int((np.cumsum(one[order]) < 0.9).sum()) + 1]
        rows.append([np.log(part[inside] / part[inside].sum())[None] for part in (one, other)])
    wanted = [float(theirs(f"{name}_div", *row)[0]) for row in rows]
    made = judged(fuzzy_from(f"top_p_{name}_div", 0.4), p, q)
    assert made.tolist() == pytest.approx(wanted, rel=1e-9)


def test_a_type_left_out_is_js_div_as_their_readme_says():
    assert fuzzy_from(None, 0.4) == fuzzy_from(fsd_div_threshold=0.4) == fuzzy_from("js_div", 0.4)
    assert fuzzy_from("js_div", 0.4) == Fuzzy(0.4, "js_paper") != Fuzzy(0.4)


def test_fuzzys_own_names_keep_their_meaning():
    for name in ("js", "top_k_js", "js_paper", "top_k_js_paper", "top_p_js_paper", "kl_reversed"):
        assert fuzzy_from(name, 0.4) == Fuzzy(0.4, name)
    assert fuzzy_from("kl_reversed_processed", 0.4) == Fuzzy(0.4, "kl_reversed", processed=True)


def test_epsilon_keeps_a_token_that_a_processor_rules_out_from_making_kl_infinite():
    pair = logits_of_a_pair(1.0)
    own = judged(Fuzzy(0.4, "kl", processed=True), *pair)
    assert own.isinf().any() and judged(Fuzzy(0.4, "kl", processed=True, epsilon=1e-10), *pair).isfinite().all()


def test_no_threshold_and_sd_are_exact_and_0_is_fuzzy():
    assert fuzzy_from("js_div", None) == fuzzy_from("sd", 0.4) == fuzzy_from() == Exact()
    assert fuzzy_from("js_div", fsd_div_threshold=0) == Fuzzy(0, "js_paper")


def test_equal_distributions_are_at_0_under_every_name():
    p, _ = logits_of_a_pair(1.0)
    for name in (*NAMES, *PROCESSED):
        assert judged(fuzzy_from(name, 0.4), p, p).tolist() == pytest.approx([0] * GAMMA, abs=1e-12)
    log_p = torch.from_numpy(p).log_softmax(-1)
    assert float(divergence("top_k_js_paper", log_p, log_p, k=50, top_p=0.9).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fuzzy_from("hellinger", 0.1), "unknown fsd_div_type 'hellinger'; known: kl_div,"),
        (lambda: fuzzy_from("js_dvi", 0.1), "unknown fsd_div_type 'js_dvi'; did you mean 'js_div'?"),
        (lambda: fuzzy_from("js_div", 0.1, ["top_q"]), "fsd_div_logit_processor=['top_q'] must name"),
        (lambda: fuzzy_from("js_div", 0.1, [TopKLogitsWarper(3)]), "must name the call's own warpers, of temperature,"),
        (lambda: Fuzzy(0.1, warpers="temperatur"), "unknown warper of Fuzzy 'temperatur'; did you mean 'temperature'?"),
        (lambda: Fuzzy(0.1, warpers="top_k", processed=True), "processed=True is under all processors"),
        (lambda: Fuzzy(0.1, epsilon=-1), "epsilon=-1 must be a probability to add"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_bad_names_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)
