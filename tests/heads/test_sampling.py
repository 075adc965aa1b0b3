"""Random numbers of training depend on a row, not on its batch, its padding or its process. Drafts at a sample of
starts, which they choose: all of them give the full loss, fewer its unbiased estimate."""

import dataclasses
import itertools

import pytest
import torch

from specheads.data.datasets import Collator
from specheads.heads import sampling
from specheads.heads.eagle import with_noise
from specheads.heads.sampling import AnchoredStarts
from specheads.losses.targets import ENDED
from tests.reference.slow_heads import rows
from tests.reference.slow_heads import shallow_spec_model as spec_model

MASK = 2**64 - 1
HEADS = [
    ("eagle3", {"draft_vocab_size": 60, "norm_output": True}),
    ("eagle", {"steps": 3}),
    ("eagle3", {"num_layers": 2, "draft_vocab_size": 60}),
    ("mtp", {}),
    ("mtp", {"num_modules": 2}),
    ("eagle3", {"draft_vocab_size": 60, "sliding_window": 2}),
    ("mtp", {"sliding_window": 2}),
    ("medusa", {"draft_vocab_size": 60}),
    ("hydra", {"prefix_layer": True}),
]


def plain_splitmix(x):
    """The published finalizer, on Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_numbers_are_scrambled_as_splitmix_does():
    numbers = [0, 1, 2**63 - 1, -1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 12345678901234567]
    scrambled = [x & MASK for x in sampling.scramble(torch.tensor(numbers)).tolist()]
    assert scrambled == [plain_splitmix(x & MASK) for x in numbers]
    # the reference stream of seed 1234567, whose state grows by the golden ratio
    states = torch.tensor(1234567) + torch.arange(1, 4) * sampling.GOLDEN
    assert [x & MASK for x in sampling.scramble(states).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


def test_a_row_draws_the_same_in_any_batch_and_under_any_padding():
    coin = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (3, 9), generator=coin)
    documents = torch.ones_like(tokens)
    documents[1, 6:] = 0
    every = sampling.random_keys(tokens, documents, 7)
    alone = sampling.random_keys(tokens[1:2, :6], documents[1:2, :6], 7)
    assert torch.equal(every[1:2, :6], alone)
    left = torch.cat([torch.full((1, 4), 3), tokens[1:2, :6]], 1), torch.tensor([[0] * 4 + [1] * 6])
    assert torch.equal(sampling.random_keys(*left, 7)[:, 4:], alone)
    changed = tokens.clone()
    changed[0, 8] += 1
    assert (sampling.random_keys(changed, documents, 7)[0] != every[0]).all(), "another row"
    assert (sampling.random_keys(tokens.flip(1)[:1], documents[:1], 7).flip(1) != every[0]).all(), "its order counts"
    assert (sampling.random_keys(tokens, documents, 8) != every).all(), "another step"


def test_numbers_are_uniform_and_independent_over_rows_positions_steps_and_features():
    tokens = torch.arange(40).unsqueeze(1) * torch.ones(1, 25, dtype=torch.long)  # rows that differ little
    seeds = [sampling.random_keys(tokens, torch.ones_like(tokens), seed) for seed in range(20)]
    kinds = {
        "keys": sampling.uniform(torch.stack(seeds)).flatten(),
        "features": torch.stack([sampling.uniform(row) for row in sampling.split_keys(seeds[0], 20)]).flatten(),
    }
    for name, numbers in kinds.items():
        assert numbers.min() >= 0 and numbers.max() < 1 and numbers.unique().numel() > 0.99 * numbers.numel(), name
        counts = torch.histc(numbers, 50, 0, 1)
        expected = numbers.numel() / 50
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 105, name  # chi-squared of 49 degrees of freedom: above 105 once in 200,000 runs
        for lag in (1, 20, 25, 500, 1000):
            apart = numbers - 0.5
            correlation = float((apart[lag:] * apart[:-lag]).mean() * 12)
            assert abs(correlation) < 4.5 / (numbers.numel() - lag) ** 0.5, (name, lag)
    assert not (sampling.uniform(seeds[0]).flatten() == kinds["features"].view(1000, 20)[:, 0]).any(), "other keys"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_uniform_within_its_width_and_each_rows_own(dtype):
    tokens = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1))
    keys = sampling.random_keys(tokens, torch.ones_like(tokens), 3)
    features = torch.zeros(4, 16, 64, dtype=dtype)
    noise = with_noise(features, keys, 0.1)
    assert noise.dtype == dtype and noise.abs().max() <= 0.1 + 1e-3 and abs(float(noise.float().mean())) < 5e-3
    assert float(noise.float().std()) == pytest.approx(0.2 / 12**0.5, rel=0.03)
    assert torch.equal(with_noise(features[2:3], keys[2:3], 0.1), noise[2:3])
    assert not torch.equal(noise[0], noise[1])


# --- Anchors ---


def batch_of(*lengths):
    return Collator(0)(rows(*lengths))


def value_and_gradients(model, batch):
    out = model(**batch)
    values = [out.loss, *(out.terms[f"loss_depth_{k}"] for k in (1, 2, 3))]
    grads = torch.autograd.grad(out.loss, list(model.head.parameters()))
    return [t.detach() for t in (*values, *grads)], out.ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_as_many_anchors_as_starts_give_the_full_loss(kind, options, first):
    batch = batch_of(12, 7)
    full, ranks = value_and_gradients(spec_model(kind, **options).train(), batch)
    for anchors in (9 + first, 1000):  # a row of 12 has 10 starts of a draft, 9 of more than one
        model = spec_model(kind, anchors=anchors, anchor_first=first, **options).train()
        anchored, seen = value_and_gradients(model, batch)
        for one, other in zip(full, anchored, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        # Whichever starts before an answer's last token, which gain nothing, are among the anchors.
        assert [row for row in seen.tolist() if row[0] != ENDED] == [row for row in ranks.tolist() if row[0] != ENDED]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("kind", "options"), HEADS)
@pytest.mark.sampled(3)
def test_the_mean_over_every_draw_of_anchors_is_the_full_loss(kind, options, first, monkeypatch):
    lengths = (8, 6, 4) if first else (9, 7, 3)  # of the last all starts are taken: two, or none
    batch = batch_of(*lengths)
    full, _ = value_and_gradients(spec_model(kind, **options).train(), batch)
    model = spec_model(kind, anchors=2, anchor_first=first, **options).train()
    starts, sample = [], AnchoredStarts.sample

    def every(targets, keys, count, depth):
        found = sample(targets, keys, 1000, depth)
        starts[:] = [
            columns[weights > 0].tolist() for columns, weights in zip(found.columns, found.weights, strict=True)
        ]
        return sample(targets, keys, count, depth)

    monkeypatch.setattr(AnchoredStarts, "sample", every)
    model(**batch)
    monkeypatch.undo()
    assert len(starts[0]) > 3 and len(starts[1]) > 2 and len(starts[2]) == 2 * first
    found = []
    for chosen in itertools.product(*(itertools.combinations(row, 2) for row in starts[:2])):
        order = torch.zeros(3, lengths[0])
        for row, columns in enumerate(chosen):
            order[row, list(columns)] = 0.9
        monkeypatch.setattr("specheads.heads.sampling.uniform", lambda _, order=order: order)
        found.append(value_and_gradients(model, batch)[0])
        monkeypatch.undo()
    assert len({float(each[0]) for each in found}) > 10, "the draws hardly differ"
    for one, *draws in zip(full, *found, strict=True):
        torch.testing.assert_close(one, torch.stack(draws).mean(0), rtol=1e-5, atol=1e-6)


def test_later_steps_run_at_the_anchors_alone_and_evaluation_everywhere():
    model, batch, shapes = spec_model("eagle3", anchors=2).train(), batch_of(12, 7), []
    unroll = model.head.unroll

    def spy(*args):
        outputs = unroll(*args)
        shapes.append([out.shape[1] for out in outputs])
        return outputs

    model.head.unroll = spy
    model(**batch)
    evaluated = model.eval()(**batch)
    assert shapes == [[12, 2, 2], [12, 12, 12]]
    model.head.config = dataclasses.replace(model.head.config, anchor_first=True)
    model.train()(**batch)
    assert shapes[2] == [2, 2, 2]
    full = spec_model("eagle3").eval()(**batch)
    assert torch.equal(evaluated.loss, full.loss) and torch.equal(evaluated.ranks, full.ranks)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_ranks_in_training_are_those_of_the_anchored_starts_and_in_evaluation_of_all(kind, options, first):
    data = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows(30, 20)]
    model, batch = spec_model(kind, anchors=6, anchor_first=first, **options), Collator(0)(data)
    if kind == "eagle":
        model.head.config = dataclasses.replace(model.head.config, noise=0.0)
    torch.manual_seed(0)
    some = model.train()(**batch).ranks.tolist()
    full = spec_model(kind, **options)
    full.load_state_dict(model.state_dict())
    every = model.eval()(**batch).ranks
    assert torch.equal(every, full.eval()(**batch).ranks)
    every = [row[:3] for row in every.tolist()]
    assert 3 <= len(some) <= 12 < len(every) and all(row in every for row in some)


def test_options_that_do_not_go_with_anchors_are_refused():
    with pytest.raises(ValueError, match="anchors=0 "):
        spec_model("eagle", anchors=0)
    with pytest.raises(ValueError, match="medusa head option anchor_first is for a sample of starts: give anchors"):
        spec_model("medusa", anchor_first=True)
    for kind in ("eagle3", "medusa", "hydra"):
        with pytest.raises(ValueError, match=f"{kind} head options anchors and dpace"):
            spec_model(kind, anchors=2, dpace=0.5)


def test_a_batch_without_a_second_draft_gives_the_full_loss():
    ids = rows(12)[0]["input_ids"]
    mask = torch.arange(12).unsqueeze(0) == 2  # the first token that is drafted, and by the first draft alone
    for kind, options in (("eagle3", {"draft_vocab_size": 97}), ("eagle", {"steps": 3}), ("medusa", {}), ("mtp", {})):
        full, some = (
            spec_model(kind, **options, **more).train()(torch.tensor([ids]), loss_mask=mask)
            for more in ({}, {"anchors": 2})
        )
        torch.testing.assert_close(some.loss, full.loss, rtol=1e-6, atol=0)
        assert full.loss > 0
        some.loss.backward()


@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_a_batch_without_a_draft_has_no_loss(kind, options):
    model = spec_model(kind, anchors=2, anchor_first=True, **options).train()
    out = model(torch.tensor([rows(12)[0]["input_ids"]]), loss_mask=torch.zeros(1, 12, dtype=torch.bool))
    assert out.loss == 0
    out.loss.backward()


def test_one_unrolled_step_is_of_the_anchors_too_if_they_are_asked_for_first_drafts():
    batch = Collator(0)([{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows(12, 7)])
    for kind, options in (("eagle3", {"steps": 1}), ("medusa", {"num_heads": 1})):
        model = spec_model(kind, anchors=3, **options).train()
        assert len(model(**batch).ranks) > 6
        model.head.config = dataclasses.replace(model.head.config, anchor_first=True)
        assert 0 < len(model(**batch).ranks) <= 6


def test_passes_over_a_row_are_those_of_the_first_draft_and_those_at_the_anchors():
    assert (
        spec_model("eagle3", steps=4).head.passes(100)
        == spec_model("eagle3", steps=4, anchors=200).head.passes(100)
        == 4
    )
    assert spec_model("eagle3", steps=4, anchors=10).head.passes(100) == pytest.approx(1 + 3 * 10 / 100)
    assert spec_model("eagle3", steps=4, anchors=10, anchor_first=True).head.passes(100) == pytest.approx(4 * 10 / 100)
    assert spec_model("eagle", anchors=10).head.passes(100) == spec_model("medusa").head.passes(100) == 1
    assert spec_model("medusa", num_heads=4, anchors=10).head.passes(100) == pytest.approx((1 + 3 * 10 / 100) / 4)
    assert spec_model("parallel", anchors=10, block_size=4).head.passes(100) == 1 + 10 * 4 / 100
