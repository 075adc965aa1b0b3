"""The layers of heads. Rotary positions are transformers' own and those of the papers, a new head has its base's, and
what no head can have is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specheads import Eagle3Config, EagleConfig, HydraConfig, ParallelConfig, convert
from specheads.heads.layers.block import RMSNorm
from specheads.heads.layers.rope import RotaryTable, inherited_rope
from tests.reference.foreign_rope import SCALED, frequencies
from tests.support.tiny_models import tiny_llama

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
EVERY = {"default": PLAIN, **SCALED}
KIMI = {**SCALED["yarn"], "beta_fast": 1.0, "beta_slow": 1.0}  # as Kimi K2's
DIM = 12


def table(rope, positions, head_dim=DIM):
    made = RotaryTable(head_dim, Eagle3Config(rope_parameters=rope).rope_parameters)
    made.ensure(int(positions.max()) + 1, torch.zeros(1))
    cos, sin = made(positions)
    return cos[:, 0], sin[:, 0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*EVERY, "Kimi"])
@pytest.mark.parametrize(("head_dim", "theta"), [(DIM, 500.0), (128, 500_000.0)])
def test_the_table_is_that_of_transformers_also_far_beyond_the_original_length(name, head_dim, theta):
    rope = {**EVERY.get(name, KIMI), "rope_theta": theta}
    if head_dim == 128 and "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=131_072,
        rope_parameters=dict(rope),
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 63, 64, 65, 200, 8191, 8192, 100_000]])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    for own, their in zip(table(rope, positions, head_dim), theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_the_table_is_that_of_the_papers(name):
    angles, factor = frequencies(EVERY[name], DIM)
    positions = torch.tensor([[0, 1, 5, 17, 64, 100]])
    wanted = positions.double().unsqueeze(2) * torch.tensor([*angles, *angles], dtype=torch.float64)
    for own, their in zip(table(EVERY[name], positions), (wanted.cos(), wanted.sin()), strict=True):
        torch.testing.assert_close(own.double(), their * factor, rtol=0, atol=2e-5)  # 100 of float32's roundings


def test_every_kind_of_scaling_is_another_table():
    tables = [torch.cat(table(rope, torch.arange(1, 40).unsqueeze(0))) for rope in EVERY.values()]
    for i, one in enumerate(tables):
        assert all((one - other).abs().max() > 0.05 for other in tables[:i])


# --- Whose positions a new head has ---


def test_a_new_head_has_its_bases_positions():
    for name, rope in EVERY.items():
        base = tiny_llama(num_hidden_layers=3, rope_parameters=dict(rope))
        for head in ("eagle", "eagle3", "parallel"):
            assert convert(base, head).head.config.rope_parameters == rope, (head, name)
            assert convert(base, head, rope_parameters=PLAIN).head.config.rope_parameters == PLAIN, (head, name)
    assert convert(base, head, rope_theta=77).head.config.rope_parameters == {**PLAIN, "rope_theta": 77.0}


def test_what_a_config_leaves_to_transformers_is_written_out():
    """The original length where there is none is that of the base, and YaRN's factor the quotient of both."""
    config = LlamaConfig(max_position_embeddings=256, rope_parameters={**SCALED["yarn"], "factor": None})
    assert inherited_rope(config) == SCALED["yarn"]
    config = LlamaConfig(
        max_position_embeddings=64,
        rope_parameters={k: v for k, v in SCALED["llama3"].items() if k != "original_max_position_embeddings"},
    )
    assert inherited_rope(config) == SCALED["llama3"]
    old = LlamaConfig(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4})  # as transformers 4 wrote it
    assert inherited_rope(old) == SCALED["linear"]


def test_a_base_whose_layers_differ_gives_those_of_its_full_attention():
    config = Gemma3TextConfig(
        rope_parameters={"full_attention": SCALED["linear"], "sliding_attention": {"rope_type": "default"}}
    )
    assert inherited_rope(config) == SCALED["linear"]


def test_where_no_head_can_have_the_bases_positions_its_own_are_plain_of_the_same_theta():
    for rope in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
    ):
        assert inherited_rope(LlamaConfig(head_dim=8, rope_parameters={**rope, "rope_theta": 500.0})) == PLAIN, rope


def test_heads_saved_before_positions_could_be_scaled_are_read_as_they_were():
    for kind in (EagleConfig, Eagle3Config, ParallelConfig):
        assert kind.from_options({"rope_theta": 500.0}) == kind(rope_parameters=PLAIN)
        assert kind.from_options({"rope_theta": None}) == kind()
    assert HydraConfig.from_options({"rope_theta": None}) == HydraConfig()
    config = Eagle3Config(rope_parameters=SCALED["llama3"])
    saved = {name: value for name, value in config.to_dict().items() if name != "kind"}
    assert Eagle3Config.from_options(saved) == config


LLAMA3, LINEAR = SCALED["llama3"], SCALED["linear"]
REFUSED = {
    "length": ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' has frequencies that change with the length"),
    "two tables": ({"rope_type": "longrope"}, "'longrope' has frequencies that change with the length of the text"),
    "a name alone": ("llama3", "'llama3'; expected a table with rope_type, rope_theta and what the type needs"),
    "unknown": ({"rope_type": "ntk"}, "unknown rope_type='ntk'; known: default, linear, llama3, yarn"),
    "no name": ({"rope_type": ["yarn"]}, r"unknown rope_type=\['yarn'\]"),
    "a slip": ({"rope_type": "linear", "factr": 2.0}, "unknown option of rope_type='linear' 'factr'; did you mean"),
    "another type's": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "unknown option .* 'beta_fast'"),
    "missing": ({"rope_type": "llama3", "factor": 8.0}, "needs rope_theta, low_freq_factor, high_freq_factor, or"),
    "no theta": ({"rope_type": "linear", "factor": 2.0}, "needs rope_theta"),
    "a small factor": ({**LINEAR, "factor": 0.5}, "factor=0.5; expected a number from 1 to"),
    "no number": ({**LINEAR, "factor": "2"}, "factor='2'; expected a number"),
    "a truth": ({**LINEAR, "factor": True}, "factor=True; expected a number"),
    "endless": ({**LINEAR, "factor": float("inf")}, "factor=inf; expected"),
    "not a number": ({**LINEAR, "factor": float("nan")}, "factor=nan; expected"),
    "huge": ({**LINEAR, "factor": 10**400}, "factor=1000.*; expected"),
    "half a position": ({**LLAMA3, "original_max_position_embeddings": 8.5}, "8.5; expected a whole number from 1"),
    "crossed": ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    "betas crossed": ({**SCALED["yarn"], "beta_slow": 64}, "beta_slow=64.0 must not be above beta_fast=32.0"),
    "no truth": ({**SCALED["yarn"], "truncate": 1}, "truncate=1; expected true or false"),
    "no rotation": ({"rope_type": "default", "rope_theta": 1}, "rope_theta=1; expected a number above 1"),
}  # fmt: skip


def test_what_no_head_can_have_is_refused_by_name():
    for rope, message in REFUSED.values():
        with pytest.raises(ValueError, match=f"eagle3 head option rope_parameters: .*{message}"):
            Eagle3Config(rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_theta and rope_parameters: give theta in the latter"):
        Eagle3Config.from_options({"rope_theta": 500.0, "rope_parameters": PLAIN})


# --- Norms ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norms_values_are_torchs_own_in_the_dtype_of_the_input(dtype):
    generator = torch.Generator().manual_seed(0)
    ours, torchs = RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(16, generator=generator))
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 16, generator=generator)
    assert torch.equal(ours(x), torchs(x))
    assert torch.equal(ours(x.to(dtype)), torchs(x.to(dtype).float()).to(dtype))
