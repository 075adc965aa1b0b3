"""Random draws of training depend on a row, not on its batch, its padding or its process."""

import pytest
import torch

from specheads.heads import sampling
from specheads.heads.eagle import with_noise

MASK = 2**64 - 1


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
