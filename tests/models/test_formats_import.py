"""Claims about reading foreign heads: what they draft here is what their own forward says, and what we cannot hold is
refused by name. The fixtures and the forwards are tests/reference/foreign.py, which knows nothing of the library."""

from __future__ import annotations

import json

import pytest
import torch

from specheads import CheckpointError, SpecModel, load_head
from specheads.models import saved_head
from specheads.training.features.plan import SaveOptions, tapped_layers
from specheads.training.recipe.recipe import Recipe
from tests.reference import foreign, foreign_depths
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.tiny_models import tiny_llama

EAGLE3 = {
    "the EAGLE repository": ({"form": "eagle"}, (2, 4, 5)),
    "SpecForge": ({"form": "specforge", "nested": [0, 2, 5]}, (1, 3, 6)),
    "vLLM": ({"form": "vllm", "top": [1, 3, 6]}, (1, 3, 6)),
    "both places": ({"form": "vllm", "top": [1, 3, 6], "nested": [0, 2, 5]}, (1, 3, 6)),
    "two layers, all tokens": ({"form": "sglang", "nested": [2, 6], "draft": 97}, (3, 7)),
    "speculators": ({"form": "speculators", "top": [2, 3, 4]}, (2, 3, 4)),
    "speculators, usual layers": ({"form": "speculators"}, (2, 4, 5)),
    "ModelOpt": ({"form": "modelopt"}, (2, 4, 5)),
    "ModelOpt, all tokens": ({"form": "modelopt", "nested": [1, 3, 4, 5], "draft": 97}, (2, 4, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("case", EAGLE3)
def test_an_eagle3_head_drafts_what_its_own_forward_says(case, base, tmp_path, hf_log):
    options, layers = EAGLE3[case]
    with_embeddings = case in ("SpecForge", "speculators")
    tensors = foreign.eagle3(tmp_path / "head", embed=embeddings(base) if with_embeddings else None, **options)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base, allow_pickle=options["form"] == "eagle")
    assert model.head.layers == layers
    named = {"speculators": "speculators EAGLE-3", "modelopt": "ModelOpt's"}.get(
        options["form"], "EAGLE-3 (the EAGLE rep"
    )
    assert [r for r in hf_log.records if named in r.getMessage() and "kind eagle3" in r.getMessage()]
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    ids = torch.arange(40) + tensors["d2t"] if "d2t" in tensors else None
    assert_drafts(
        model, lambda s, t, d: foreign.eagle3_logits(tensors, prefix, s, layers, embeddings(base), t, d), ids
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output")])
def test_an_eagle3_head_whose_names_begin_with_model_drafts_what_its_own_forward_says(flags, weights, base, tmp_path):
    """As NeMo Automodel writes it: all but the output matrix."""
    tensors = foreign.eagle3(tmp_path, "vllm", **dict.fromkeys(flags, True))
    (tmp_path / "model.safetensors").unlink()
    bare = ("lm_head.weight", "d2t", "t2d")
    foreign.write(tmp_path, None, {n if n in bare else f"model.{n}": t for n, t in tensors.items()}, weights)
    model = SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=True)
    ids, layers = torch.arange(40) + tensors["d2t"], (2, 4, 5)
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, "layers.0.", s, layers, embeddings(base), t, d, flags),
        ids,
    )


def test_a_name_with_and_without_the_prefix_is_refused(base, tmp_path):
    tensors = foreign.eagle3(tmp_path, "vllm")
    both = {"norm.weight": tensors["norm.weight"].clone()}
    foreign.write(tmp_path, None, {f"model.{name}": tensor for name, tensor in tensors.items()} | both)
    with pytest.raises(CheckpointError, match=r"has both norm.weight and model.norm.weight"):
        SpecModel.from_pretrained(tmp_path, base=base)


@pytest.mark.parametrize(
    "flags",
    [("norm_before_residual",), ("norm_before_fc",), ("fc_norm",), ("norm_output",), ("fc_norm", "norm_output")],
)
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_an_eagle3_head_with_other_norms_drafts_what_its_own_forward_says(form, flags, base, tmp_path):
    tensors = foreign.eagle3(tmp_path, form, **dict.fromkeys(flags, True))
    model = SpecModel.from_pretrained(tmp_path, base=base)
    ids, layers = torch.arange(40) + tensors["d2t"], (2, 4, 5)
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, "layers.0.", s, layers, embeddings(base), t, d, flags),
        ids,
    )


@pytest.mark.parametrize(("form", "bias"), [("eagle", True), ("vllm", False), ("sglang", True), ("sglang", False)])
def test_an_eagle_head_drafts_what_its_own_forward_says(form, bias, base, tmp_path):
    tensors = foreign.eagle(tmp_path / "head", form, embed=embeddings(base), bias=bias)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base, allow_pickle=True)
    assert model.head.config.fc_bias == bias and model.head.layers == (8,)
    lm_head = base.get_output_embeddings().weight.detach()
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(tensors, s, embeddings(base), lm_head, t, d))


MEDUSA = {
    "version 1": {"form": "v1"}, "version 2": {"form": "v2"}, "two layers": {"form": "trtllm", "layers": 2},
    "vLLM": {"form": "vllm"}, "vLLM, some tokens": {"form": "vllm", "draft": 40, "layers": 2},
    "vLLM, one matrix": {"form": "vllm", "shared": True}, "vLLM, no biases": {"form": "vllm", "biased": False},
    "vLLM, one matrix of some tokens": {"form": "vllm", "shared": True, "draft": 40},
}  # fmt: skip


@pytest.mark.parametrize("case", MEDUSA)
def test_a_medusa_head_drafts_what_its_own_forward_says(case, base, tmp_path):
    options = MEDUSA[case]
    tensors = foreign_depths.medusa(tmp_path / "head", **options)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base, allow_pickle=options["form"] == "v1")
    assert model.head.config.num_heads == 3  # the published config of version 1 says 2
    lm_head = base.get_output_embeddings().weight.detach()

    def forward(states, tokens, drafted):
        return foreign_depths.medusa_logits(tensors, states[-1][-1], lm_head, layers=options.get("layers", 1))

    assert_drafts(model, forward, tensors.get("token_map"))


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_hydra_head_drafts_what_its_own_forward_says(prefix, layers, base, tmp_path):
    tensors = foreign_depths.hydra(tmp_path / "head", prefix, layers=layers, base=base)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base, allow_pickle=True)
    assert model.head.config.prefix_layer == prefix
    options = {"base": base if prefix else None, "layers": layers}
    assert_drafts(model, lambda s, t, d: foreign_depths.hydra_logits(tensors, s, embeddings(base), t, d, **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hydra_head_arch": "eagle-attn"},
            "its heads are 'eagle-attn'; mlp and prefix-mlp, with its tensors, are read",
        ),
        ({"hydra_head_arch": "prefix-mlp"}, "its heads are 'prefix-mlp'"),
        ({"grounded_heads": False}, "grounded_heads=false; heads here read the tokens drafted"),
        ({"hidden_state_offset": 1}, "hidden_state_offset=1"),
        ({"hydra_num_layers": 4}, "says 3 heads of 4 layers, and its tensors make up 3 of 2"),
        ({"hidden_size": 64}, "made for another base: hidden_size is 32, not 64"),
    ],
)
def test_a_hydra_head_that_cannot_be_held_is_refused(changes, message, base, tmp_path):
    foreign_depths.hydra(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=True)


def test_rows_of_the_whole_vocabulary_are_taken_by_the_map(base, tmp_path):
    """vLLM takes them so where the matrix has more rows than the map."""
    tensors = foreign_depths.medusa(tmp_path / "a", "vllm", draft=40)
    whole = {f"lm_heads.{h}.weight": torch.randn(97, 32) for h in range(3)}
    for name, matrix in whole.items():
        matrix[tensors["token_map"]] = tensors[name]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    foreign.write(tmp_path / "b", config, {**tensors, **whole})
    one, other = (SpecModel.from_pretrained(tmp_path / name, base=base).head.state_dict() for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_head_that_names_its_base_needs_no_other(base_dir, tmp_path):
    foreign_depths.medusa(tmp_path / "head", "trtllm", base_model_name_or_path=str(base_dir))
    model = SpecModel.from_pretrained(tmp_path / "head")
    assert model.base.name_or_path == model.config.base_model_name_or_path == str(base_dir)
    foreign.eagle3(tmp_path / "other", "vllm")
    with pytest.raises(CheckpointError, match="give it with base"):
        SpecModel.from_pretrained(tmp_path / "other")


def test_an_imported_head_is_one_of_ours(base_dir, tmp_path):
    foreign.eagle3(tmp_path / "theirs", "specforge")
    model = SpecModel.from_pretrained(tmp_path / "theirs", base=str(base_dir))
    model.save_pretrained(tmp_path / "ours")
    assert load_head(model.base, tmp_path / "theirs").head.config == model.head.config  # as a recipe's init_from does
    again = SpecModel.from_pretrained(tmp_path / "ours")
    assert again.head.config == model.head.config and again.config.base_fingerprint == model.config.base_fingerprint
    assert all(torch.equal(t, model.head_state_dict()[name]) for name, t in again.head_state_dict().items())


def test_a_foreign_head_is_read_beside_its_base_or_the_bases_config(base, tmp_path):
    foreign.eagle3(tmp_path / "theirs", "specforge")
    recipe = Recipe.from_dict(
        {
            "base": "base", "data": {"train": "rows"}, "head": None, "init_from": str(tmp_path / "theirs"),
            "training": {"output_dir": str(tmp_path)},
        }
    )  # fmt: skip
    with pytest.raises(
        CheckpointError,
        match=r"can only be read beside its base; import it first: .*specheads import \S+ OUT --base BASE`",
    ):
        saved_head.read(tmp_path / "theirs")
    taps = SpecModel.from_pretrained(tmp_path / "theirs", base=base).head.layers
    assert tapped_layers(recipe, SaveOptions(tmp_path), base.config) == tuple(sorted(taps))


# --- What no head here can hold ---


@pytest.mark.parametrize("name", ["use_mrope", "add_para_norm"])
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_flag_of_other_heads_is_refused_by_name(form, name, base, tmp_path):
    foreign.eagle3(tmp_path, form, **{name: True})
    with pytest.raises(CheckpointError, match=rf"its head has {name}=true, which is not supported yet"):
        SpecModel.from_pretrained(tmp_path, base=base)


REFUSED = {
    "layers in two places": (
        {"top": [1, 3, 6], "nested": [1, 3, 6]}, r"says hidden_states \[1, 3, 6\], and eagle_config.* \[2, 4, 7\]"
    ),
    "layers unsorted": ({"top": [6, 3, 1]}, r"hidden_states \[6, 3, 1\], are not in ascending order"),
    "a layer after the last": ({"top": [2, 4, 9]}, r"reads hidden_states \[10\], and servers capture only .* 1 to 7"),
    "layers of text": ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "'2,4'; expected a list of layer numbers"),
    "another size": ({"hidden_size": 64}, "made for another base: hidden_size is 32, not 64"),
    "another vocabulary": ({"vocab_size": 128}, "made for another base: vocab_size is 97, not 128"),
    "another stream": ({"target_hidden_size": 64}, "target_hidden_size"),
    "more layers": ({"num_hidden_layers": 2}, "says 2 decoder layers, and its tensors make up 1"),
    "a Qwen3 block": ({"model_type": "qwen3"}, "decoder is of type 'qwen3'"),
    "another activation": ({"hidden_act": "relu"}, "activation is 'relu'; heads here have silu, gelu"),
    "norms before and after": (
        {"fc_norm": True, "norm_before_fc": True}, "norm_features and norm_before_fc: give one of them"
    ),
    "norms of ModelOpt's place": ({"eagle_config": {"norm_output": True}}, "norm_output=true, which is not supported"),
    "no fused layers": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
    "a draft vocabulary too large": ({"draft_vocab_size": 98}, "draft_vocab_size=98 exceeds the vocabulary of 97"),
    "biases that are not there": ({"attention_bias": True}, r"missing layers.0.self_attn.k_proj.bias"),
    "a size that is none": ({"intermediate_size": "40"}, "intermediate_size='40'; expected a whole number"),
    "a number that is no float": ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
    "another number of layers": ({"num_aux_hidden_states": 2}, r"=2, and it reads hidden_states \[2, 4, 5\]"),
    "another class": ({"architectures": ["MistralEagle3"]}, "of the class 'MistralEagle3', which EAGLE-3"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config.bits=4, .* are quantised"),
    "an odd head": ({"head_dim": 11}, "head_dim=11 must be even"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_eagle3_head_that_cannot_be_held_is_refused_with_the_reason(case, base, tmp_path):
    changes, message = REFUSED[case]
    foreign.eagle3(tmp_path, "vllm", **changes)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


def rewritten(folder, edit):
    tensors = foreign.eagle3(folder, "vllm")
    edit(tensors)
    foreign.write(folder, None, tensors)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.weight"), "not those of EAGLE-3.*: missing fc.weight$"),
        (lambda t: t.update({"lm_head.bias": torch.zeros(40)}), "unknown lm_head.bias$"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), r"fc.weight has shape \(32, 64\), not \(32, 96\)"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 96).long()}), "fc.weight is torch.int64, where torch.float32"),
        (lambda t: t.pop("d2t"), "drafts 40 of 97 tokens, and has no d2t"),
        (lambda t: t.update({"d2t": t["d2t"] + 90}), r"d2t names token \d+ or \d+ of 97"),
        (lambda t: t.update({"d2t": -torch.arange(40)}), "d2t names 39 tokens twice"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), r"d2t is \(40,\) of torch.float32, not \(40,\) of torch.int64"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d and d2t do not name the same 40 tokens"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(97, 32)}), "not the base's matrix"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named_as_the_file_names_them(edit, message, base, tmp_path):
    rewritten(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_speculators_head_must_say_where_its_residual_is(base, tmp_path):
    foreign.eagle3(tmp_path, "speculators", norm_before_residual=None)
    with pytest.raises(CheckpointError, match="does not say norm_before_residual, which vLLM takes for true"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_p_eagle_head_must_say_which_token_its_mask_is(base, tmp_path):
    for form, changes, message in (
        ("specforge", {}, 'does not say which token .* write the one it was trained with .* as "mask_token_id"'),
        ("vllm", {"mask_token_id": 8}, "'ptd_token_id': 9, 'mask_token_id': 8.*take away what is wrong"),
        ("vllm", {"parallel_drafting": False}, "'ptd_token_id': 9, 'parallel_drafting': False"),
        ("vllm", {"ptd_token_id": 97}, "mask_token_id=97 is no token of a vocabulary of 97"),
    ):
        foreign.peagle(tmp_path, form, **changes)
        with pytest.raises(CheckpointError, match=message):
            SpecModel.from_pretrained(tmp_path, base=base)
    foreign.eagle3(tmp_path, "vllm", mask_token_id=9)  # an EAGLE-3 head
    with pytest.raises(CheckpointError, match="the mask token of a P-EAGLE head, and it has no mask_hidden"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_an_eagle_head_that_consumers_disagree_on_is_refused(base, tmp_path):
    def refused(message, **changes):
        config = json.loads((tmp_path / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            SpecModel.from_pretrained(tmp_path, base=base)

    foreign.eagle(tmp_path, "sglang", embed=embeddings(base))
    refused(r'says "bias": false and fc.bias is not zero, so SGLang would add it', bias=False)
    refused("add_para_norm=true, norms on what fc reads", bias=True, add_para_norm=True)
    refused(r"missing layers.0.self_attn.k_proj.bias", add_para_norm=False, qkv_bias=True)
    foreign.eagle(tmp_path, "vllm", embed=embeddings(base), bias=True)
    refused("missing fc.bias$", bias=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_fc_bias": False}, "biases, which vLLM drops"),
        ({"num_heads": 5}, "says 5 heads of 1 layers, and its tensors make up 3 of 1"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"truncated_vocab_size": 40}, "no token_map"),
        ({"vocab_size": 96}, "vocab_size is 97, not 96"),
    ],
)
def test_a_vllm_medusa_that_cannot_be_held_is_refused(changes, message, base, tmp_path):
    foreign_depths.medusa(tmp_path, "vllm", **changes)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_medusa_2_is_refused_with_what_to_do(base, tmp_path):
    tensors = foreign_depths.medusa(tmp_path / "a", "trtllm")
    foreign.write(tmp_path / "b", {"medusa_num_heads": 3}, {f"medusa_head.{n}": t for n, t in tensors.items()})
    with pytest.raises(CheckpointError, match=r"is a Medusa-2 model: .* as medusa_lm_head.safetensors"):
        SpecModel.from_pretrained(tmp_path / "b", base=base)


def test_too_few_layers_for_the_usual_choice_are_refused(tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    with pytest.raises(CheckpointError, match=r"hidden_states \[2, 2, 1\], are not in ascending order"):
        SpecModel.from_pretrained(tmp_path, base=tiny_llama(num_hidden_layers=4))


def test_tensors_of_two_dtypes_become_the_wider(base, tmp_path):
    rewritten(tmp_path, lambda t: t.update({"fc.weight": t["fc.weight"].bfloat16()}))
    head = SpecModel.from_pretrained(tmp_path, base=base).head
    assert head.fc.weight.dtype == torch.float32
    rewritten(tmp_path, lambda t: t.update({n: x.half() for n, x in t.items() if x.is_floating_point()}))
    assert SpecModel.from_pretrained(tmp_path, base=base, dtype="auto").head.dtype == torch.float16


def test_a_command_that_is_named_can_be_copied(base, tmp_path):
    foreign.eagle3(tmp_path / "their head", "eagle")
    with pytest.raises(CheckpointError) as refusal:
        saved_head.read(tmp_path / "their head")
    assert f"`specheads import '{tmp_path}/their head' OUT --base BASE --allow-pickle`" in str(refusal.value)


def test_a_head_in_several_pickles_is_refused_as_such(base, tmp_path):
    foreign.eagle(tmp_path, "eagle", embed=base.get_input_embeddings().weight.detach())
    shard, (pickled,) = "pytorch_model-00001-of-00001.bin", tmp_path.glob("*.bin")
    names = torch.load(pickled, weights_only=True)
    pickled.rename(tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    for allowed in (False, True):
        with pytest.raises(CheckpointError, match="pickles in several files are not read; save the head as safetensor"):
            SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=allowed)
