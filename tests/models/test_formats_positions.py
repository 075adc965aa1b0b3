"""Claims about scaled rotary positions in foreign heads: read as each program spells them, drafted with, written as
each reads them, and refused where it does not have them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from specheads import CheckpointError, SpecModel
from tests.reference import foreign, foreign_blocks, foreign_depths
from tests.reference.foreign_rope import SCALED
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.heads_on_disk import trained
from tests.support.tiny_models import tiny_llama

IDS, LAYERS = torch.arange(40), (2, 4, 5)
LLAMA3 = SCALED["llama3"]


def scaling(rope, **more):
    """As transformers 4 has it, beside rope_theta."""
    return {**{name: value for name, value in rope.items() if name != "rope_theta"}, **more}


def layer(rope):
    """A change to a head in the speculators form."""
    inner = {k: v for k, v in foreign.LLAMA.items() if k not in ("rope_theta", "tie_word_embeddings")}
    return {"transformer_layer_config": {**inner, "rope_parameters": rope}}


SPELLINGS = {
    **{f"rope_scaling, {name}": ("vllm", {"rope_scaling": scaling(rope)}, rope) for name, rope in SCALED.items()},
    **{f"speculators, {name}": ("speculators", layer(rope), rope) for name, rope in SCALED.items()},
    "type": ("vllm", {"rope_scaling": {"type": "linear", "factor": 4}}, SCALED["linear"]),
    "rope_parameters": ("specforge", {"rope_parameters": LLAMA3, "rope_theta": None}, LLAMA3),
    "both": ("vllm", {"rope_parameters": LLAMA3, "rope_scaling": scaling(LLAMA3)}, LLAMA3),
    "ModelOpt": ("modelopt", {"rope_scaling": scaling(SCALED["yarn"])}, SCALED["yarn"]),
    "the longest is the original": (
        "vllm", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}, SCALED["yarn"],
    ),
    "no factor": (
        "vllm", {
            "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64},
            "max_position_embeddings": 256,
        }, SCALED["yarn"],
    ),
    "Phi-3's place": (
        "vllm", {
            "rope_scaling": scaling(LLAMA3, original_max_position_embeddings=16),
            "original_max_position_embeddings": 64,
        }, LLAMA3,
    ),
    "default by name": ("vllm", {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}, foreign.PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_an_eagle3_head_drafts_with_its_own_positions(case, base, tmp_path):
    form, changes, rope = SPELLINGS[case]
    tensors = foreign.eagle3(tmp_path, form, **changes)
    model = SpecModel.from_pretrained(tmp_path, base=base)
    assert model.head.config.rope_parameters == rope
    prefix = "midlayer." if form == "specforge" else "layers.0."
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, prefix, s, LAYERS, embeddings(base), t, d, rope=rope),
        IDS + tensors["d2t"],
    )


MROPE = {
    "SpecForge": ({"type": "mrope", "mrope_section": [2, 2, 2]}, foreign.PLAIN),
    "AngelSlim": (
        {"type": "default", "rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True},
        foreign.PLAIN,
    ),
    "Qwen2-VL's": ({"type": "mrope", "rope_type": "default", "mrope_section": [2, 2, 2]}, foreign.PLAIN),
    "scaled too": (scaling(SCALED["yarn"], mrope_section=[2, 2, 2]), SCALED["yarn"]),
}


@pytest.mark.parametrize("case", MROPE)
def test_positions_of_images_are_read_as_those_of_text_and_the_log_says_so(case, base, tmp_path, hf_log):
    keys, rope = MROPE[case]
    tensors = foreign.eagle3(tmp_path, "vllm", rope_scaling=keys)
    model = SpecModel.from_pretrained(tmp_path, base=base)
    assert model.head.config.rope_parameters == rope
    assert [r for r in hf_log.records if "(mrope) are read as those of text: exact for text" in r.getMessage()]
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, "layers.0.", s, LAYERS, embeddings(base), t, d, rope=rope),
        IDS + tensors["d2t"],
    )


@pytest.mark.parametrize("name", SCALED)
def test_eagle_and_dspark_heads_draft_with_their_own_positions(name, base, tmp_path):
    rope, lm_head = SCALED[name], base.get_output_embeddings().weight.detach()
    eagle = foreign.eagle(tmp_path / "e", "vllm", embed=embeddings(base), rope_scaling=scaling(rope))
    model = SpecModel.from_pretrained(tmp_path / "e", base=base)
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(eagle, s, embeddings(base), lm_head, t, d, rope))
    inner = layer(rope)["transformer_layer_config"] | {"model_type": "qwen3", "num_hidden_layers": 2}
    spark = foreign_blocks.head(tmp_path / "d", "dspark", transformer_layer_config=inner)
    model = SpecModel.from_pretrained(tmp_path / "d", base=base)
    assert_drafts(
        model, lambda s, t, d: foreign_blocks.logits(spark, "dspark", s, embeddings(base), lm_head, t, d, rope=rope)
    )


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_a_hydra_prefix_layer_has_the_positions_of_its_base(name, tmp_path):
    base = tiny_llama(rope_parameters=dict(SCALED[name]))
    tensors = foreign_depths.hydra(tmp_path, True, base=base)
    model = SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=True)
    assert model.head.config.rope_parameters == SCALED[name]
    assert_drafts(model, lambda s, t, d: foreign_depths.hydra_logits(tensors, s, embeddings(base), t, d, base=base))


# --- Written ---

NEW = ("vllm", "sglang", "trtllm", "llamacpp", "modelopt", "speculators")
MOST = ("linear", "llama3", "yarn")
WRITTEN = [
    *[(to, "eagle3", name) for to in NEW for name in MOST],
    *[(to, "eagle3", name) for to in ("vllm", "speculators") for name in SCALED if name not in MOST],
    *[(to, "eagle", name) for to in ("vllm", "sglang") for name in MOST],
    *[("speculators", "parallel", name) for name in SCALED],
    *[("vllm", "eagle", name) for name in SCALED if name not in MOST],
]
PARALLEL = {"causal": False, "mask_token_id": 9, "block_size": 4, "draft_depth": 4, "taps": (1, 4, 6)}


def made(base, kind, **options):
    model = trained(base, kind, head_dim=12, **(PARALLEL if kind == "parallel" else {}), **options)
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            parameter.mul_(0.3).add_(1.0 if "norm" in name else 0.0)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("to", "kind", "name"), WRITTEN)
def test_export_then_import_keeps_the_positions_bit_for_bit(to, kind, name, base, tmp_path):
    rope = SCALED[name]
    model = made(base, kind, rope_parameters=rope)
    model.export(tmp_path / "a", to)
    again = SpecModel.from_pretrained(tmp_path / "a", base=base)
    assert again.head.config.rope_parameters == rope
    assert all(torch.equal(t, again.head_state_dict()[n]) for n, t in model.head_state_dict().items())
    again.export(tmp_path / "b", to)
    config = (tmp_path / "a" / "config.json").read_text()
    assert config == (tmp_path / "b" / "config.json").read_text()
    config = json.loads(config)
    if to == "speculators":
        assert config["transformer_layer_config"]["rope_parameters"] == rope
        assert "rope_theta" not in config["transformer_layer_config"]
    else:
        assert config["rope_theta"] == 500.0 and "rope_parameters" not in config
        assert config["rope_scaling"] == scaling(rope, type=rope["rope_type"])


def test_plain_positions_are_written_without_scaling(base, tmp_path):
    for to in NEW:
        made(base, "eagle3", rope_theta=500).export(tmp_path / to, to)
        config = json.loads((tmp_path / to / "config.json").read_text())
        assert "rope_scaling" not in config, "TensorRT-LLM knows no rope_type called default"


@pytest.mark.parametrize("to", ["vllm", "modelopt"])
def test_an_exported_head_drafts_by_their_forward_with_its_positions(to, base, tmp_path):
    model = made(base, "eagle3", rope_parameters=LLAMA3, num_attention_heads=2, num_key_value_heads=1,
                 rms_norm_eps=foreign.EPS, draft_vocab_size=40)  # fmt: skip
    model.export(tmp_path / "out", to)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, prefix, s, LAYERS, embeddings(base), t, d, rope=LLAMA3),
        IDS + tensors["d2t"],
    )


def test_a_linear_head_of_the_usual_theta_goes_to_the_eagle_repository(base, tmp_path):
    rope = {**SCALED["linear"], "rope_theta": 10_000.0}
    for kind in ("eagle", "eagle3"):
        made(base, kind, rope_parameters=rope).export(tmp_path / kind, "eagle")
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert config["rope_scaling"]["type"] == "linear" and config["rope_scaling"]["factor"] == 4.0


OPTIONS, MSCALE = SCALED["yarn with its options"], SCALED["yarn with mscale"]
REFUSED = [
    ("eagle", "eagle3", LLAMA3, r"scaled \(rope_type llama3\), and its readers have linear; formats that can: llama"),
    ("eagle", "eagle", SCALED["linear"], "with rope_theta=500, and its readers then take 10000; formats .*sglang, vl"),
    ("sglang", "eagle3", OPTIONS, "with attention_factor, which its readers do not heed; formats .*: spec.*, vllm$"),
    ("sglang", "eagle", MSCALE, "with mscale, mscale_all_dim, which its readers do not heed; formats that can: vllm$"),
    *[(to, "eagle3", OPTIONS, "with attention_factor, truncate, which") for to in ("trtllm", "llamacpp", "modelopt")],
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "rope", "message"), REFUSED)
def test_positions_that_a_reader_does_not_have_are_refused(to, kind, rope, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        made(base, kind, rope_parameters=rope).export(tmp_path / "out", to)


def test_a_prefix_layer_goes_where_its_bases_positions_are_read_and_no_others(tmp_path):
    options = {"num_heads": 2, "prefix_layer": True}
    linear = tiny_llama(rope_parameters={**SCALED["linear"], "rope_theta": 10_000.0})
    trained(linear, "hydra", **options).export(tmp_path / "same", "hydra")
    again = SpecModel.from_pretrained(tmp_path / "same", base=linear, allow_pickle=True)
    assert again.head.config.rope_parameters == linear.config.rope_parameters
    for base, more, message in (
        (linear, {"rope_theta": 10_000.0}, "prefix layer has rope_parameters of its own, and the base's is read"),
        (tiny_llama(rope_parameters=dict(LLAMA3)), {}, r"\(rope_type llama3\), and its readers have linear; no format"),
        (
            tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}), {},
            "read with the base's positions, which heads here cannot have: rope_type='dynamic'",
        ),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            trained(base, "hydra", **options, **more).export(tmp_path / "out", "hydra")
    trained(tiny_llama(rope_parameters=dict(LLAMA3)), "hydra", num_heads=2).export(tmp_path / "plain", "hydra")


UNREADABLE = {
    "two tables": (
        {"rope_parameters": SCALED["linear"], "rope_scaling": scaling(LLAMA3)}, "rope_scaling and rope_theta do not say"
    ),
    "by length": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "change with the length of the text"),
    "long and short": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "'longrope' has frequenc"
    ),
    "a part that is none": ({"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 of head_dim=12 is 1 value"),
    "two parts": (
        {"rope_scaling": scaling(LLAMA3, partial_rotary_factor=0.5), "partial_rotary_factor": 0.25},
        "says partial_rotary_factor=0.25 and 0.5; take one away",
    ),
    "not whole": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
    "what others heed": ({"rope_scaling": scaling(SCALED["yarn"], attn_factor=2.0)}, "rope_scaling.attn_factor=2.0"),
    "no table": ({"rope_scaling": "yarn"}, "rope_scaling='yarn'; expected a table"),
    "no theta": ({"rope_theta": "big"}, "rope_theta='big'; expected a number above 0"),
    "no rotation": ({"rope_theta": 1.0}, "rope_theta=1.0; expected a number above 1"),
    "unheard of": ({"rope_scaling": {"rope_type": "xdrope"}}, "rope_type='xdrope'"),
    "two types": ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "and type=.linear."),
    "two thetas": ({"rope_parameters": scaling(LLAMA3, rope_theta=50.0)}, "rope_parameters and rope_theta do not say"),
    "one for each kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 50.0}}}, "has rope_parameters.full_attention.rope_theta=5"
    ),
    "unscaled, with a factor": (
        {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "its head has rope_scaling.factor=4.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_positions_that_no_head_can_have_are_refused_with_the_reason(case, base, tmp_path):
    changes, message = UNREADABLE[case]
    foreign.eagle3(tmp_path, "vllm", **changes)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


@pytest.mark.parametrize("rope", [LLAMA3, SCALED["yarn"]], ids=["llama3", "yarn"])
def test_the_text_is_the_bases_own_with_scaled_positions_far_beyond_their_original_length(rope):
    base = tiny_llama(rope_parameters=dict(rope))
    ids = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(4))
    wanted = base.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
    for kind in ("eagle3", "parallel"):
        model = trained(base, kind)
        assert model.head.config.rope_parameters == rope
        assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None), wanted)
