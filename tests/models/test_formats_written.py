"""Claims about the files of an export: configs, READMEs and options as each program has them, whole or not there, and
refused where a form cannot hold the head."""

from __future__ import annotations

import json

import pytest
import torch

from specheads import CheckpointError, SpecModel, convert
from specheads.models.formats import ENGINES
from specheads.models.formats.export.exporting import engines_for
from tests.reference import foreign
from tests.support.export_files import CUSTOM, EAGLE3, config_of, imported, made, tensors_in
from tests.support.tiny_models import tiny_llama, with_adapter


@pytest.mark.parametrize("to", EAGLE3)
def test_the_usual_layers_are_left_out_and_all_tokens_have_no_map(to, base, tmp_path):
    config = config_of(made(base, "eagle3", draft_vocab_size=97), to, tmp_path / "out")
    assert foreign.layers_read(to, config) == [2, 4, 5]
    said = json.dumps(config)
    assert ("layer_ids" in said) == (to in ("speculators", "modelopt"))  # which always say them
    assert not {"d2t", "t2d"} & set(tensors_in(tmp_path / "out"))
    assert config["draft_vocab_size"] == 97


def test_the_configs_are_those_of_the_tables(base, tmp_path):
    model = made(base, "eagle3", draft_vocab_size=40, taps=CUSTOM)
    common = {k: v for k, v in foreign.LLAMA.items() if k != "bos_token_id"}
    for to in ("vllm", "sglang", "trtllm", "llamacpp", "modelopt"):
        config = config_of(model, to, tmp_path / to)
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and common.items() <= config.items()
        assert "target_hidden_size" not in config and "bias" not in config
    names = set(tensors_in(tmp_path / "modelopt"))
    assert "t2d" not in names and {"d2t", "lm_head.weight", "layers.0.hidden_norm.weight"} <= names
    four = config_of(made(base, "eagle3", taps=(1, 2, 3, 4)), "vllm", tmp_path / "four")
    assert four["num_aux_hidden_states"] == 4
    speculators = config_of(model, "speculators", tmp_path / "speculators")
    assert speculators["norm_before_residual"] is False and speculators["target_hidden_size"] is None
    assert speculators["transformer_layer_config"]["rope_parameters"]["rope_theta"] == foreign.THETA
    assert speculators["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert "embed_tokens.weight" in tensors_in(tmp_path / "speculators")

    eagle = made(base, "eagle")
    plain = config_of(eagle, "vllm", tmp_path / "e-vllm")
    assert (plain["architectures"], plain["bias"]) == (["LlamaForCausalLM"], False)
    assert not {"lm_head.weight", "fc.bias"} & set(tensors_in(tmp_path / "e-vllm"))
    theirs = config_of(eagle, "sglang", tmp_path / "e-sglang")
    assert (theirs["architectures"], theirs["bias"]) == (["LlamaForCausalLMEagle"], False)
    assert not tensors_in(tmp_path / "e-sglang")["fc.bias"].any()

    medusa = config_of(made(base, "medusa", num_heads=3, draft_vocab_size=40), "vllm", tmp_path / "m")
    assert medusa.items() >= {
        "model_type": "medusa", "truncated_vocab_size": 97, "num_heads": 3, "num_hidden_layers": 1,
        "medusa_fc_bias": True, "original_lm_head": False,
    }.items()  # fmt: skip
    trtllm = config_of(made(base, "medusa", num_heads=3), "trtllm", tmp_path / "t")
    assert trtllm["medusa_num_heads"] == trtllm["num_medusa_heads"] == 3


_MOVED = ("norm_features", "norm_before_fc", "norm_output")
NORMS_OF = {
    "vllm": (*_MOVED, "norm_before_residual"), "speculators": (*_MOVED, "norm_before_residual"), "sglang": _MOVED,
    "trtllm": _MOVED, "llamacpp": ("norm_before_residual", "norm_before_fc"),
}  # fmt: skip
REFUSED = [
    ("sglang", "medusa", {}, r"sglang has no form for a head of kind medusa; formats that can: medusa, trtllm, vllm$"),
    ("speculators", "eagle", {}, "no form for a head of kind eagle; formats that can: eagle, sglang, vllm$"),
    ("medusa", "medusa", {"draft_vocab_size": 40}, "drafts 40 of 97 tokens.*formats that can: vllm$"),
    ("medusa", "medusa", {"num_layers": 2}, "2 layers a head differ.*formats that can: trtllm, vllm$"),
    ("vllm", "medusa", {"tap": 7}, r"reads hidden_states 7.*final norm \(8\); no format can$"),
    ("eagle", "eagle3", {"taps": CUSTOM}, r"\[1, 3, 6\], and \[2, 4, 5\] are hard-coded; .*: llamacpp, modelopt"),
    ("vllm", "eagle3", {"taps": (2, 4, 8)}, r"reads hidden_states \[8\], and servers capture.*; no format can$"),
    ("hydra", "hydra", {"num_layers": 3}, "later blocks of a head differ"),
    ("hydra", "hydra", {"prefix_layer": True, "head_dim": 6}, "prefix layer has head_dim of its own"),
    ("hydra", "hydra", {"draft_vocab_size": 40}, "drafts 40 of 97 tokens"),
    ("vllm", "eagle3", {"taps": (5, 4, 2)}, "not in ascending order"),
    ("sglang", "eagle3", {"num_layers": 2}, "2 decoder layers.*formats that can: speculators, vllm$"),
    ("llamacpp", "eagle3", {"taps": (1, 2, 3, 4)}, "reads 4 layers, and its readers take 3; .*: modelopt, s.*vllm$"),
    ("llamacpp", "eagle3", {"mlp_bias": True}, "has biases, which are dropped; formats that can: speculators, vllm$"),
    *[
        (to, "eagle3", {option: True}, f"it has {option}, which .*; train .* head.{option}=false; formats .*vllm$")
        for to in EAGLE3
        for option in ("norm_features", "norm_before_fc", "norm_before_residual", "norm_output")
        if option not in NORMS_OF.get(to, ())
    ],
    ("vllm", "eagle", {"fc_bias": True}, "fc has a bias, which is dropped; formats that can: eagle, sglang$"),
    ("sglang", "eagle", {"num_layers": 2}, "2 decoder layers.*formats that can: eagle, vllm$"),
    ("sglang", "eagle", {"taps": (6,)}, r"reads hidden_states 6.*final norm \(8\); no format can$"),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options", "message"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_with_the_reason_and_what_can(to, kind, options, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        made(base, kind, **options).export(tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["lora", "peft"])
def test_a_head_with_adapters_on_its_base_is_not_exported_without_them(by, tmp_path):
    base, options = (tiny_llama(), {"lora": {"r": 2, "lora_alpha": 4}}) if by == "lora" else (with_adapter(), {})
    model = convert(base, "eagle3", draft_vocab_size=40, **options)
    assert engines_for(model.config, model.base, model.head) == []
    with pytest.raises(CheckpointError, match="merge the adapters into the base, save it, and put the head beside"):
        model.export(tmp_path / "out", "vllm")
    assert not list(tmp_path.iterdir())


def test_an_unknown_engine_is_refused_by_name(base, tmp_path):
    with pytest.raises(ValueError, match="unknown format to export to 'vlm'; did you mean 'vllm'"):
        made(base, "eagle3").export(tmp_path / "out", "vlm")
    assert len(ENGINES) == 14


def test_an_export_is_whole_or_not_there(base, tmp_path, monkeypatch):
    model = made(base, "eagle3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="full exists and is not an empty directory; give a new one"):
        model.export(tmp_path / "full", "vllm")
    (tmp_path / "empty").mkdir()
    assert model.export(tmp_path / "empty", "vllm") == tmp_path / "empty"
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        model.export(tmp_path / "out", "vllm")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_dtype_and_embeddings_are_as_asked(base, tmp_path):
    model = made(base, "eagle3", draft_vocab_size=40)
    model.export(tmp_path / "half", "eagle", dtype="bfloat16", embeddings=True)
    tensors = tensors_in(tmp_path / "half")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16", "torch.int64", "torch.bool"}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(tensors["embed_tokens.weight"], base.get_input_embeddings().weight.bfloat16())
    assert imported(tmp_path / "half", base).head.dtype == torch.bfloat16  # whose embeddings are the base's, rounded
    assert model.head.dtype == torch.float32
    with pytest.raises(CheckpointError, match="cannot hold the base's embeddings"):
        made(base, "medusa").export(tmp_path / "m", "vllm", embeddings=True)


def test_a_base_that_is_not_in_memory_is_said_so(tmp_path):
    model = made(tiny_llama(), "eagle")
    model.base.get_input_embeddings().to("meta")
    with pytest.raises(CheckpointError, match="the base's embeddings are not in memory"):
        model.export(tmp_path / "out", "vllm")


SERVED = {
    "vllm": '"method": "eagle3", "model": "{out}", "num_speculative_tokens": 5',
    "sglang": "--speculative-draft-model-path {out} --speculative-num-steps 5",
    "trtllm": "--extra_llm_api_options {out}/trtllm.yml", "llamacpp": "convert_hf_to_gguf.py {out} --target-model-dir",
    "speculators": "vllm serve {out}", "eagle": 'ea_model_path="{out}"',
    "modelopt": "--extra_llm_api_options {out}/trtllm.yml",
}  # fmt: skip


@pytest.mark.parametrize("to", SERVED)
def test_the_readme_of_an_export_says_how_it_is_served_and_what_to_expect(to, named, tmp_path):
    made(named, "eagle3", draft_vocab_size=40).save_pretrained(tmp_path / "head")
    history = [{"eval_accepted_length": 1.5}, {"loss": 2.0, "note": "x" * (5 << 20)}, {"eval_accepted_length": 3.28}]
    (tmp_path / "head" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    model = SpecModel.from_pretrained(tmp_path / "head")
    text = (model.export(tmp_path / "out", to) / "README.md").read_text()
    assert SERVED[to].format(out=tmp_path / "out") in text and model.base.name_or_path in text and "$" not in text
    assert "Written for: " in text and "the base's own | 3.28 |" in text
    (tmp_path / "head" / "results.json").write_text('{"eval_accepted_length": 3.5}')
    (tmp_path / "head" / "trainer_state.json").unlink()
    assert "the base's own | 3.50 |" in (model.export(tmp_path / "out3", to) / "README.md").read_text()
    (tmp_path / "head" / "results.json").unlink()
    assert "was not recorded" in (model.export(tmp_path / "out2", to) / "README.md").read_text()
    if to == "eagle":
        assert f"optimum-cli export openvino --model {tmp_path / 'out'} " in text and "hidden_layers_list" in text
    if to in ("trtllm", "modelopt"):
        assert f"speculative_model: {tmp_path / 'out'}\n" in (tmp_path / "out" / "trtllm.yml").read_text()


@pytest.mark.parametrize("to", ["trtllm", "modelopt"])
def test_tensorrt_llm_is_told_of_other_layers_in_the_file_it_is_started_with(to, base, tmp_path):
    lines = "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 5\n  speculative_model: {out}\n"
    for taps, more in (((2, 4, 5), ""), (CUSTOM, "  eagle3_layers_to_capture: [0, 2, 5]\n")):
        out = tmp_path / str(len(more))
        made(base, "eagle3", taps=taps).export(out, to)
        assert (out / "trtllm.yml").read_text() == lines.format(out=out) + more
