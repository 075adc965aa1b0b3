"""Claims about EAGLE-3's relatives, in and out: Qwen3's blocks, other activations, heads of which a part is rotated,
SGLang's older names of norms, trained embeddings, P-EAGLE. They draft what their own forward says and come back bit for
bit."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from specheads import CheckpointError, SpecModel
from tests.reference import foreign, foreign_blocks, slow_heads
from tests.reference.foreign import HEAD_DIM, PLAIN, Random, write
from tests.reference.foreign_rope import PARTIAL, SCALED
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import assert_comes_back, made, tensors_in

GELU_TANH = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
NORMED = {"qk_norm": True, "draft_vocab_size": 40}


def with_norms(folder, form, keys, table=""):
    """A head of Qwen3's block: norms on queries and keys in its file."""
    tensors, make = foreign.eagle3(folder, form), Random(18)
    tensors |= {f"layers.0.self_attn.{m}_norm.weight": make.norm(HEAD_DIM) for m in "qk"}
    config = json.loads((folder / "config.json").read_text())
    (config[table] if table else config).update(keys)
    write(folder, config, tensors)
    return tensors


def assert_own_forward(model, base, tensors, rope=PLAIN, act=F.silu, flags=(), later=()):
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = model.head.config
    flags = [*flags, *["norm_before_residual"] * config.norm_before_residual, *["fc_norm"] * config.norm_features]
    ids = torch.arange(40) + tensors["d2t"] if "d2t" in tensors else None
    embed = tensors.get("embed_tokens.weight", embeddings(base))
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(
            tensors,
            "layers.0.",
            s,
            model.head.layers,
            embed,
            t,
            d,
            flags,
            rope,
            later,
            act=act,
            mask=config.mask_token_id,
        ),
        ids,
    )


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_head_of_qwen3s_block_drafts_what_its_own_forward_says(form, base, tmp_path):
    keys = {"model_type": "qwen3"} if form == "speculators" else QWEN3
    tensors = with_norms(tmp_path, form, keys, "transformer_layer_config" if form == "speculators" else "")
    assert_own_forward(SpecModel.from_pretrained(tmp_path, base=base), base, tensors)


@pytest.mark.parametrize(("act", "function"), [("gelu", F.gelu), ("gelu_pytorch_tanh", GELU_TANH)])
def test_an_activation_is_the_one_that_the_config_names(act, function, base, tmp_path):
    tensors = foreign.eagle3(tmp_path, "vllm", hidden_act=act)
    assert_own_forward(SpecModel.from_pretrained(tmp_path, base=base), base, tensors, act=function)


@pytest.mark.parametrize("at", ["the top", "rope_parameters", "both"])
def test_a_part_of_each_head_is_rotated(at, base, tmp_path):
    keys = {"partial_rotary_factor": 0.5} if at != "rope_parameters" else {}
    keys |= {"rope_parameters": PARTIAL} if at != "the top" else {}
    tensors = foreign.eagle3(tmp_path, "vllm", **keys)
    assert_own_forward(SpecModel.from_pretrained(tmp_path, base=base), base, tensors, PARTIAL)


def test_norms_by_sglangs_older_names_are_those_of_fc_norm(base, tmp_path):
    tensors = foreign.eagle3(tmp_path / "theirs", "vllm", fc_norm=True)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del config["fc_norm"]
    older = dict(zip([f"fc_norm.{i}.weight" for i in range(3)], ["low", "mid", "high"], strict=True))
    renamed = {f"aux_norm_{older[n]}.weight" if n in older else n: t for n, t in tensors.items()}
    write(tmp_path / "theirs", config | {"use_aux_norm": True}, renamed)
    model = SpecModel.from_pretrained(tmp_path / "theirs", base=base)
    assert_own_forward(model, base, tensors)
    model.export(tmp_path / "ours", "sglang")
    again = tensors_in(tmp_path / "ours")
    assert all(torch.equal(again[name], tensors[name]) for name in older)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_embeddings_that_were_trained_are_the_heads_own(form, base, tmp_path):
    own = Random(19)(97, 32, scale=1.0)
    tensors = foreign.eagle3(tmp_path, form, embed=own, embed_requires_grad=True)
    model = SpecModel.from_pretrained(tmp_path, base=base)
    assert_own_forward(model, base, tensors)
    assert model.head.embed_tokens.weight.requires_grad and torch.equal(model.head.embed_tokens.weight, own)


MSCALED = SCALED["yarn with mscale"]
LATENT = {**slow_heads.LATENT, "num_key_value_heads": None}
MASKED = {"mask_token_id": 9, "num_layers": 2, "norm_features": True}
OUT = [
    ("vllm", {**MASKED, "own_embeddings": True}, PLAIN, F.silu), ("speculators", MASKED, PLAIN, F.silu),
    ("vllm", {"own_embeddings": True}, PLAIN, F.silu), ("speculators", {"own_embeddings": True}, PLAIN, F.silu),
    ("vllm", NORMED, PLAIN, F.silu), ("speculators", {**NORMED, "hidden_act": "gelu_pytorch_tanh"}, PLAIN, GELU_TANH),
    ("vllm", {**NORMED, "num_layers": 2, "norm_before_residual": False}, PLAIN, F.silu),
    ("sglang", {"rope_parameters": PARTIAL, "norm_before_residual": False}, PARTIAL, F.silu),
    ("vllm", {"rope_parameters": PARTIAL}, PARTIAL, F.silu),
    ("vllm", {**LATENT, "num_layers": 2, "norm_features": True}, PLAIN, F.silu),
    ("vllm", {**LATENT, "q_lora_rank": None, "rope_parameters": MSCALED}, MSCALED, F.silu),
    ("speculators", {"rope_parameters": PARTIAL, "qk_norm": True, "hidden_act": "gelu"}, PARTIAL, F.gelu),
]  # fmt: skip


@pytest.mark.parametrize(("to", "options", "rope", "act"), OUT)
def test_what_is_written_drafts_by_their_forward_and_comes_back(to, options, rope, act, base, tmp_path):
    options = {**options, "rope_theta": None} if "rope_parameters" in options else options
    model = made(base, "eagle3", **{"draft_vocab_size": 40, **options})
    assert_comes_back(model, to, base, tmp_path)
    later = [f"layers.{i}." for i in range(1, model.head.config.num_layers)]
    assert_own_forward(model, base, tensors_in(tmp_path / "a"), rope, act, later=later)


def test_a_head_that_drafts_a_block_may_rotate_a_part_too(base, tmp_path):
    tensors = foreign_blocks.head(tmp_path, "z-lab", partial_rotary_factor=0.5)
    lm_head = base.get_output_embeddings().weight.detach()
    assert_drafts(
        SpecModel.from_pretrained(tmp_path, base=base),
        lambda s, t, d: foreign_blocks.logits(tensors, "z-lab", s, embeddings(base), lm_head, t, d, rope=PARTIAL),
    )


NOT_HELD = [
    *[(to, "eagle3", LATENT, "its attention is latent.*formats that can: vllm$")
      for to in ("sglang", "trtllm", "llamacpp", "eagle", "speculators", "modelopt")],
    ("vllm", "eagle3", {**LATENT, "norm_before_fc": True, "mlp_bias": True}, "it has norm_before_fc.*it has mlp_bias"),
    ("vllm", "eagle3", {**LATENT, "rope_theta": None, "rope_parameters": SCALED["llama3"]}, "has yarn.*no format can$"),
    *[(to, "eagle3", NORMED, "its blocks are Qwen3's.*formats that can: speculators, vllm$")
      for to in ("sglang", "trtllm", "llamacpp", "eagle")],
    ("sglang", "eagle3", {"mask_token_id": 9}, r"after the first read a mask \(mask_token_id\).*: speculators, vllm$"),
    ("sglang", "eagle3", {"own_embeddings": True}, r"embeddings of its own \(own_embeddings\).*: speculators, vllm$"),
    ("vllm", "eagle3", {**NORMED, "attention_bias": True}, "Qwen3's with biases, and vLLM drops that of o_proj"),
    ("vllm", "eagle", {"qk_norm": True}, r"norms on queries and keys \(qk_norm\).*no format can$"),
    ("vllm", "eagle3", {"hidden_act": "gelu"}, "its activation is gelu, and its readers have silu.*: speculators$"),
    ("trtllm", "eagle3", {"rope_theta": None, "rope_parameters": PARTIAL}, "it rotates 0.5 of each attention head"),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options", "message"), NOT_HELD)
def test_what_readers_do_not_have_is_refused_by_name(to, kind, options, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        made(base, kind, **options).export(tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_a_llama_class_with_qwen3s_config_is_refused(base, tmp_path):
    with_norms(tmp_path, "vllm", {"model_type": "qwen3"})
    with pytest.raises(CheckpointError, match="its decoder is of type 'qwen3'; such heads here have llama's block"):
        SpecModel.from_pretrained(tmp_path, base=base)
