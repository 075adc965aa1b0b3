"""The probs of K likeliest tokens and a tail are the full ones with the rest of the draft vocabulary as one outcome."""

import pytest
import torch

from specheads.decoding.tree.draft_logits import DraftIds
from specheads.losses.functions import DISTRIBUTION_LOSSES, overlap
from specheads.losses.teacher import TeacherProbs, TopKTail

V, ROWS = 23, 11


def logits(seed, width=V):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def vocabulary(size):
    if size is None:
        return None
    chosen = torch.randperm(V, generator=torch.Generator().manual_seed(4))[:size].sort().values
    return DraftIds.of(chosen, V)


def coarse(p, q, k, draft):
    """Of one row, by hand: the probability of each outcome under p and q, and that of the draft vocabulary."""
    ranked = sorted(range(V), key=lambda token: -p[token])
    kept, others = ranked[:k], ranked[k:]
    ids = list(range(V)) if draft is None else draft.ids.tolist()
    first, second = [], []
    for token in kept:
        if token in ids:
            first.append(p[token])
            second.append(q[ids.index(token)])
    rest = [i for i, token in enumerate(ids) if token not in kept]
    if rest:  # every unknown token counts as one of the draft vocabulary
        first.append(sum(p[token] for token in others))
        second.append(sum(q[i] for i in rest))
    mass = sum(first)
    first = torch.tensor(first, dtype=torch.float64) / mass
    return first, torch.tensor(second, dtype=torch.float64), mass


@pytest.mark.parametrize("size", [None, 9, 2])
@pytest.mark.parametrize("k", [1, 4, 22, V, 99])
def test_every_loss_and_the_overlap_equal_those_of_the_coarse_probs(k, size):
    draft, target = vocabulary(size), logits(1)
    drafted = logits(2, V if size is None else size).requires_grad_()
    top = TopKTail.from_logits(target, k)
    probs = top.probs(torch.arange(ROWS), draft)
    assert torch.equal(probs.best, target.argmax(-1))
    log_q = drafted.log_softmax(-1)
    mapped = probs.outcomes(log_q)
    p, q = target.softmax(-1).tolist(), log_q.detach().exp().tolist()
    for r in range(ROWS):
        first, second, mass = coarse(p[r], q[r], k, draft)
        assert float(probs.mass[r]) == pytest.approx(mass, rel=1e-12)
        if not mass:
            continue
        for name, loss in DISTRIBUTION_LOSSES.items():
            expected = loss(second.log().unsqueeze(0), first.log().unsqueeze(0))
            got = loss(mapped[r : r + 1], probs.log_p[r : r + 1])
            assert float(got) == pytest.approx(float(expected), rel=1e-9, abs=1e-12), name
        alpha = overlap(mapped[r : r + 1], (probs.log_p + probs.mass.log().unsqueeze(1))[r : r + 1])
        assert float(alpha) == pytest.approx(float(torch.minimum(first * mass, second).sum()), rel=1e-9)
    for name, loss in DISTRIBUTION_LOSSES.items():
        (grad,) = torch.autograd.grad(loss(mapped, probs.log_p).sum(), drafted, retain_graph=True)
        assert torch.isfinite(grad).all(), name


@pytest.mark.parametrize("size", [None, 9])
def test_k_of_the_whole_vocabulary_gives_the_full_probs(size):
    draft, target, drafted = vocabulary(size), logits(1), logits(2, size or V).requires_grad_()
    probs, full = (
        TopKTail.from_logits(target, V).probs(torch.arange(ROWS), draft),
        TeacherProbs.from_logits(target, draft),
    )
    torch.testing.assert_close(probs.mass, full.mass)
    log_q = drafted.log_softmax(-1)
    for name, loss in DISTRIBUTION_LOSSES.items():
        pair = [loss(one.outcomes(log_q), one.log_p) for one in (probs, full)]
        torch.testing.assert_close(*pair, msg=name)
        grads = [torch.autograd.grad(value.sum(), drafted, retain_graph=True)[0] for value in pair]
        torch.testing.assert_close(*grads, msg=name)


@pytest.mark.parametrize("size", [None, 9])
def test_the_acceptance_probability_is_never_underestimated(size):
    """Merging outcomes can only hide where two distributions differ, and hides less the more tokens are known."""
    draft, target, log_q = vocabulary(size), logits(1), logits(2, size or V).log_softmax(-1)
    full = TeacherProbs.from_logits(target, draft)
    exact = overlap(log_q, full.log_p + full.mass.log().unsqueeze(1))
    before = torch.full((ROWS,), 2.0, dtype=torch.float64)
    for k in (1, 3, 8, V):
        probs = TopKTail.from_logits(target, k).probs(torch.arange(ROWS), draft)
        alpha = overlap(probs.outcomes(log_q), probs.log_p + probs.mass.log().unsqueeze(1))
        assert (alpha >= exact - 1e-12).all() and (alpha <= before + 1e-12).all()
        assert (probs.mass >= full.mass - 1e-12).all()
        before = alpha
    torch.testing.assert_close(before, exact)


def test_of_equally_likely_tokens_the_best_is_that_of_argmax():
    target = torch.zeros(3, V, dtype=torch.bfloat16)
    target[1, 5:9] = 2.0
    for k in (1, 3, V):
        top = TopKTail.from_logits(target, k)
        assert torch.equal(top.ids[:, 0], target.argmax(-1))
        assert all(len(set(row)) == k for row in top.ids.tolist())


def test_a_text_as_teacher_is_certain_of_its_next_token():
    tokens = torch.tensor([[4, 7, 9], [1, 2, 3]])
    probs = TopKTail.from_text(tokens).probs(torch.tensor([0, 1, 3, 4]), None)
    assert probs.best.tolist() == [7, 9, 2, 3]
    log_q = logits(2)[:4].log_softmax(-1)
    torch.testing.assert_close(
        DISTRIBUTION_LOSSES["ce"](probs.outcomes(log_q), probs.log_p.double()),
        -log_q.gather(1, probs.best.unsqueeze(1)).squeeze(1),
    )
