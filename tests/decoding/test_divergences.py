"""The divergences of fuzzy acceptance, against plain numpy in float64."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from specheads import DraftTree, Fuzzy, Sampler
from specheads.decoding.acceptance import TargetProbs
from specheads.decoding.acceptance.divergences import NAMES, divergence
from specheads.decoding.probs.divergences import forward_kl, js, reverse_kl, tv
from specheads.decoding.tree.draft_logits import DraftLogits
from specheads.losses.functions import DISTRIBUTION_LOSSES


def kl(a, b):
    return sum(x * math.log(x / y) if y else math.inf for x, y in zip(a, b, strict=True) if x)


def reference(name, q, p, k, top_p):
    """One pair of distributions, as lists."""
    if name.startswith("top_k_"):
        best = sorted(range(len(p)), key=lambda i: -p[i])[:k]
        rest = [i for i in range(len(p)) if i not in best]
        q, p = ([probs[i] for i in best] + [sum(probs[i] for i in rest)] for probs in (q, p))
    if name.startswith("top_p_"):
        inside, held = [], 0.0
        for i in sorted(range(len(p)), key=lambda i: -p[i]):
            if held < top_p and p[i]:
                inside.append(i)
                held += p[i]
        if not sum(q[i] for i in inside):
            return math.inf
        q, p = ([probs[i] / sum(probs[j] for j in inside) for i in inside] for probs in (q, p))
    m = [(a + b) / 2 for a, b in zip(q, p, strict=True)]
    return {
        "kl": lambda: kl(q, p),
        "kl_reversed": lambda: kl(p, q),
        "js": lambda: (kl(q, m) + kl(p, m)) / 2,
        "js_paper": lambda: (kl(m, q) + kl(m, p)) / 2,
        "tv": lambda: sum(abs(a - b) for a, b in zip(q, p, strict=True)) / 2,
    }[name.removeprefix("top_k_").removeprefix("top_p_")]()


def distributions(num, size, *, holes=0.0, seed=0):
    """(num, size) random distributions, some of whose entries are exactly zero."""
    random = np.random.default_rng(seed)
    weights = np.exp(2 * random.standard_normal((num, size)))
    weights[random.random((num, size)) < holes] = 0
    weights[:, 0] += weights.sum(1) == 0
    return weights / weights.sum(1, keepdims=True)


def test_every_divergence_is_what_numpy_makes_of_it():
    for holes, name in itertools.product([0.0, 0.4, 0.9], NAMES):
        for size in (2, 7, 60):
            q, p = distributions(12, size, holes=holes, seed=1), distributions(12, size, holes=holes, seed=2)
            for k, top_p in ((1, 0.3), (2, 0.7), (5, 0.9), (50, 1.0)):
                with np.errstate(divide="ignore"):
                    scores = [torch.from_numpy(np.log(probs)) for probs in (q, p)]
                wanted = [reference(name, a, b, k, top_p) for a, b in zip(q.tolist(), p.tolist(), strict=True)]
                for rows in (12, 2, 1):  # few together have fewer tokens that any of them may need
                    parts = [
                        divergence(name, *two, k=k, top_p=top_p)
                        for two in zip(*(s.split(rows) for s in scores), strict=True)
                    ]
                    assert torch.cat(parts).tolist() == pytest.approx(wanted, abs=1e-12, rel=1e-12)


def test_the_tail_of_float32_makes_no_finite_divergence_infinite():
    """A token whose chance is e⁻²⁰⁰ has 0 in float32; over a nucleus of everything it counts with its logarithm."""
    p = torch.tensor([[0.0, -200.0, -1.0, -torch.inf], [0.0, -3.0, -1.0, -90.0]])
    q = torch.tensor([[0.0, -0.5, -1.0, 0.3], [0.0, -3.0, -1.0, -1.0]])
    inside = p > -torch.inf
    exact = [row.double().masked_fill(~inside, -torch.inf).log_softmax(-1) for row in (q, p)]
    wanted = (exact[0].exp() * (exact[0] - exact[1]).masked_fill(~inside, 0)).sum(-1)
    made = divergence("top_p_kl", q, p, k=1, top_p=1.0)
    assert made.tolist() == pytest.approx(wanted.tolist(), rel=1e-5) and wanted.isfinite().all()
    for name in ("top_p_js", "top_p_tv"):
        assert divergence(name, q, p, k=1, top_p=1.0).isfinite().all()
    rule = Fuzzy(float(wanted.max()) + 1, "top_p_kl", top_p=1.0)
    tree = DraftTree(torch.tensor([[5, 2]]), torch.tensor([[-1, 0]]), 1, q[:1].softmax(-1).expand(1, 2, 4).contiguous())
    kept = DraftLogits(q[:1].unsqueeze(0), torch.zeros(1, 2, dtype=torch.long), None, 4)
    sampler = Sampler(do_sample=True)
    probs = TargetProbs(replace(tree, logits=kept), p[:1].expand(1, 2, 4).contiguous(), sampler)
    assert probs.p.shape == (1, 2, 4)  # made, as where a token is drawn
    assert rule.distance(probs)[:, 0].tolist() == pytest.approx(wanted[:1].tolist(), rel=1e-5)


def test_what_is_not_a_number_is_near_nothing():
    """And does not end in an error of its own: the distribution that is drawn from has one that says what is wrong."""
    for name in ["top_p_js", "top_p_tv", "js", "top_k_js"]:
        broken = torch.full((2, 5), torch.nan)
        assert divergence(name, torch.zeros(2, 5), broken, k=2, top_p=0.8).isnan().all()


def test_a_distribution_of_some_tokens_alone_is_as_one_that_gives_the_others_no_chance():
    for name in NAMES:
        ids, q, p = torch.tensor([1, 4, 5, 11]), distributions(30, 4, seed=1), distributions(30, 12, holes=0.3, seed=2)
        p[:5, [0, 2, 3, 6, 7, 8, 9, 10]] = 0  # and some that stand within them
        p /= p.sum(1, keepdims=True)
        log_q, log_p = torch.from_numpy(q).log(), torch.from_numpy(p).log()
        whole = torch.full_like(log_p, -torch.inf).index_copy_(1, ids, log_q)
        options = {"k": 3, "top_p": 0.8}
        torch.testing.assert_close(
            divergence(name, log_q, log_p, **options, ids=ids), divergence(name, whole, log_p, **options)
        )


def test_a_divergence_of_equal_distributions_is_0():
    for name in NAMES:
        probs = torch.from_numpy(distributions(20, 30)).log()
        assert divergence(name, probs, probs, k=5, top_p=0.8).tolist() == pytest.approx([0] * 20, abs=1e-12)


def test_the_top_k_form_is_at_most_the_whole():
    """Data processing: merging tokens brings distributions no further apart; with k near V both agree."""
    for name in ["kl", "js", "tv"]:
        q, p = (torch.from_numpy(distributions(300, 40, holes=0.2, seed=seed)).log() for seed in (3, 4))
        whole = divergence(name, q, p, k=1, top_p=1)
        before = torch.zeros(300)
        for k in (1, 2, 5, 20, 39, 40, 99):
            merged = divergence(f"top_k_{name}", q, p, k=k, top_p=1)
            assert (merged <= whole + 1e-12).all() and (merged >= before - 1e-12).all()
            before = merged
        torch.testing.assert_close(before, whole)


def test_bounds():
    q, p = (torch.from_numpy(distributions(300, 9, holes=0.7, seed=seed)).log() for seed in (5, 6))
    disjoint = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log()
    assert (divergence("js", q, p, k=1, top_p=1) <= math.log(2) + 1e-12).all()
    assert (divergence("tv", q, p, k=1, top_p=1) <= 1 + 1e-12).all()
    assert float(divergence("js", *disjoint, k=1, top_p=1)) == pytest.approx(math.log(2))
    assert float(divergence("tv", *disjoint, k=1, top_p=1)) == 1
    for name in ("kl", "kl_reversed", "js_paper"):
        assert float(divergence(name, *disjoint, k=1, top_p=1)) == math.inf


def test_a_nucleus_ends_with_the_token_that_fills_it():
    """Exactly: ½ of the distribution is one token's, and the next is not looked at."""
    q, p = torch.tensor([[0.125, 0.125, 0.5, 0.25]]).log(), torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    apart = [float(divergence("top_p_tv", q, p, k=1, top_p=top_p)) for top_p in (0.25, 0.5, 0.5 + 1e-6, 1.0)]
    assert apart == pytest.approx([0, 0, 5 / 12, 5 / 12], abs=1e-6)


def test_logits_far_apart_give_numbers_and_no_nan():
    """In float32, where the probability of a token 200 below the best is no longer a number."""
    for name in NAMES:
        q, p = (
            torch.tensor([[0.0, 200.0, -200.0, 3.0], [5.0, 5.0, 0.0, -90.0]]).roll(n, 1).log_softmax(-1) for n in (0, 1)
        )
        own = divergence(name, q, p, k=2, top_p=0.9)
        wide = divergence(name, q.double(), p.double(), k=2, top_p=0.9)
        assert not own.isnan().any()
        torch.testing.assert_close(own.double(), wide, atol=1e-4, rtol=1e-4)


def test_forward_is_kl_of_p_from_q_whatever_an_option_calls_it():
    log_p, log_q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert float(forward_kl(log_q, log_p)) == pytest.approx(0.5 * math.log(2))
    assert float(reverse_kl(log_q, log_p)) == math.inf
    losses = {name: float(loss(log_q, log_p)) for name, loss in DISTRIBUTION_LOSSES.items() if name.startswith("kl")}
    assert losses == {"kl": pytest.approx(0.5 * math.log(2)), "kl_reversed": math.inf}
    rules = {name: float(divergence(name, log_q, log_p, k=1, top_p=1)) for name in ("kl", "kl_reversed")}
    assert rules == {"kl": math.inf, "kl_reversed": pytest.approx(0.5 * math.log(2))}


def test_an_outcome_of_no_chance_leaves_the_gradient_a_number():
    """p lacks the second token, neither has the third."""
    for compare in [forward_kl, js, tv]:
        logits = torch.tensor([[0.3, -0.2, -torch.inf]], dtype=torch.float64, requires_grad=True)
        log_p = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64).log()
        (gradient,) = torch.autograd.grad(compare(logits.log_softmax(-1), log_p).sum(), logits)
        step = torch.zeros_like(logits)
        step[0, 0] = 1e-6
        moved = [compare((logits.detach() + sign * step).log_softmax(-1), log_p).item() for sign in (1, -1)]
        assert gradient.isfinite().all() and gradient[0, 0].item() == pytest.approx(
            (moved[0] - moved[1]) / 2e-6, abs=1e-6
        )
