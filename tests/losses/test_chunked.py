"""A sum in chunks equals that in one piece, and teacher probabilities are computed only where they are needed."""

import pytest
import torch

from specheads.data.datasets import Collator
from specheads.heads.sampling import AnchoredStarts, random_keys
from specheads.losses.chunked import chunked_sum
from specheads.losses.targets import DraftTargets
from specheads.losses.teacher import LiveTeacher
from tests.reference.slow_heads import rows
from tests.reference.slow_heads import shallow_spec_model as spec_model

ROWS, HIDDEN, VOCAB = 11, 5, 7


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def left_out():
    """Three drafts of eleven positions: of all of them, of some, of one. Two output matrices, one used twice."""
    of = [torch.arange(ROWS), torch.tensor([0, 3, 4, 5, 10]), torch.tensor([6])]
    parts = [drawn(len(indices), HIDDEN + i)[:, :HIDDEN].clone().requires_grad_() for i, indices in enumerate(of)]
    layers = [torch.nn.Linear(HIDDEN, VOCAB, dtype=torch.float64) for _ in range(2)]
    return of, parts, [layers[0], layers[1], layers[0]]


def losses(layer, part, indices):
    logits = layer(part)
    return (logits.logsumexp(-1) * (indices + 1) + layer.weight.square().sum() * 0.1), logits.argmax(-1)


@pytest.mark.parametrize("chunk", [1, 2, 4, 11, 64])
def test_drafts_that_are_left_out_leave_value_gradients_and_returned_tensors_as_in_one_piece(chunk):
    of, parts, layers = left_out()
    parameters = [p for layer in layers[:2] for p in layer.parameters()]
    cut = []

    def compute(add, here, every, *given):
        cut.append(here)
        assert torch.equal(every, torch.arange(ROWS)[here])
        best = torch.full((len(every), 3), -1)
        for s, (indices, part) in enumerate(zip(given[:3], given[3:], strict=True)):
            loss, best[indices - here.start, s] = losses(layers[s], part, indices)
            add(loss.sum())
        return (best,)

    total, (best,) = chunked_sum(compute, [torch.arange(ROWS), *of, *parts], parameters, chunk, [*of, *of])
    grads = torch.autograd.grad(total * 0.7, [*parts, *parameters])
    assert cut == [slice(start, min(start + chunk, ROWS)) for start in range(0, ROWS, chunk)]
    plain, expected = 0, torch.full((ROWS, 3), -1)
    for s, (indices, part) in enumerate(zip(of, parts, strict=True)):
        loss, expected[indices, s] = losses(layers[s], part, indices)
        plain = plain + loss.sum()
    assert total.item() == pytest.approx(plain.item(), rel=1e-13) and torch.equal(best, expected)
    for grad, slow in zip(grads, torch.autograd.grad(plain * 0.7, [*parts, *parameters]), strict=True):
        torch.testing.assert_close(grad, slow, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), [
    (torch.float64, False, 1e-12), (torch.float32, False, 1e-5), (torch.float32, True, 0.05),
    (torch.bfloat16, False, 0.05),
])  # fmt: skip
def test_gradients_keep_their_dtype_and_do_not_depend_on_the_chunk(dtype, autocast, tolerance):
    layer, hidden = torch.nn.Linear(HIDDEN, VOCAB).to(dtype), drawn(ROWS, HIDDEN).to(dtype).requires_grad_()
    frozen = drawn(ROWS, HIDDEN).to(dtype)

    def compute(add, span, part):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            add(layer(part).float().logsumexp(-1).sum())
            add(layer(frozen[span]).float().logsumexp(-1).sum())  # no gradient reaches `hidden` here
        return ()

    found = []
    for chunk in (4, 100):
        total, _ = chunked_sum(compute, [hidden], list(layer.parameters()), chunk)
        found.append(torch.autograd.grad(total, [hidden, *layer.parameters()]))
    for one, other in zip(*found, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_gradients_of_half_precision_are_not_rounded_once_a_chunk():
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)

    def compute(add, span, part):
        add((part * weight).sum())
        return ()

    total, _ = chunked_sum(compute, [torch.ones(1000, dtype=torch.bfloat16)], [weight], 1)
    assert torch.autograd.grad(total, weight)[0] == 1000  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize(("kind", "options", "everywhere"), [
    ("medusa", {}, False), ("medusa", {"loss": "ce"}, True), ("eagle3", {}, True),
])  # fmt: skip
def test_teacher_probs_are_computed_once_a_position_and_only_where_losses_or_ranks_need_them(
    kind, options, everywhere, monkeypatch
):
    seen, logits_at = [], LiveTeacher.logits_at
    monkeypatch.setattr(LiveTeacher, "logits_at", lambda self, at: seen.extend(at.tolist()) or logits_at(self, at))
    model, batch = spec_model(kind, anchors=2, **options).train(), Collator(0)(rows(20, 9))
    targets = DraftTargets.from_batch(
        batch["input_ids"], batch["labels"] != -100, torch.ones_like(batch["input_ids"]), 3
    )
    model.draw_seed = 1
    keys = random_keys(batch["input_ids"], batch["attention_mask"], 1)
    anchored = AnchoredStarts.sample(targets, keys, 2).select(targets)
    model(**batch)
    wanted = anchored.valid if everywhere else anchored.counted
    assert seen == targets.positions[wanted.any(1)].tolist()
    assert everywhere or len(seen) <= 12 < len(targets.positions)


def test_a_parallel_heads_blocks_share_teacher_probs_where_they_overlap(monkeypatch):
    seen, logits_at = [], LiveTeacher.logits_at
    monkeypatch.setattr(LiveTeacher, "logits_at", lambda self, at: seen.extend(at.tolist()) or logits_at(self, at))
    spec_model("parallel").train()(**Collator(0)(rows(20)))
    assert len(seen) == len(set(seen)) > 10
