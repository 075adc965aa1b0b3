"""Claims about writing heads for other programs: what is written is what their forward drafts with, comes back bit for
bit, and is refused where it cannot be held."""

from __future__ import annotations

import json
from dataclasses import replace

import foreign
import foreign_depths
import pytest
import torch
from drafted import assert_drafts, embeddings
from heads_on_disk import trained
from safetensors.torch import load_file
from transformers import AutoTokenizer

from specheads import CheckpointError, SpecModel, convert, corpus
from specheads.formats import ENGINES, FORMATS
from specheads.formats.exporting import engines_for
from tests.conftest import tiny_llama

SIZES = {
    "num_attention_heads": foreign.HEADS, "num_key_value_heads": foreign.KV_HEADS, "head_dim": foreign.HEAD_DIM,
    "intermediate_size": foreign.INNER, "rms_norm_eps": foreign.EPS, "rope_theta": foreign.THETA,
}  # fmt: skip
FORMS = [(form.engine, form.kind) for form in FORMATS if form.kind != "parallel"]  # those: test_formats_blocks.py
EAGLE3 = [engine for engine, kind in FORMS if kind == "eagle3"]
CUSTOM = (1, 3, 6)  # layers other than the usual 2, 4, 5 of a base with 8


def made(base, kind, **options):
    """A head of that kind with random weights at a scale that keeps its logits near 1."""
    sizes = SIZES if kind in ("eagle", "eagle3", "parallel") else {}
    model = trained(base, kind, **{**sizes, **options})
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            parameter.mul_(0.3).add_(1.0 if "norm" in name else 0.0)
    return model


USUAL = {"eagle3": {"draft_vocab_size": 40}, "medusa": {"num_heads": 3}, "hydra": {"num_layers": 2}, "eagle": {}}


def imported(folder, base):
    return SpecModel.from_pretrained(folder, base=base, allow_pickle=True)


def tensors_in(folder):
    pickles = [path for path in folder.iterdir() if path.suffix in (".pt", ".bin")]
    if pickles:
        return torch.load(pickles[0], weights_only=True)
    return load_file(next(path for path in folder.iterdir() if path.suffix == ".safetensors"))


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(t, other[n]) and t.dtype == other[n].dtype for n, t in one.items()
    )


CASES = [
    *[(engine, kind, USUAL[kind]) for engine, kind in FORMS],
    *[(engine, "eagle3", {"draft_vocab_size": 97, "taps": CUSTOM}) for engine in EAGLE3 if engine != "eagle"],
    *[("vllm", kind, {"num_layers": 2, "attention_bias": True, "mlp_bias": True}) for kind in ("eagle", "eagle3")],
    *[(to, "eagle3", {"norm_features": True, "norm_before_residual": True}) for to in ("vllm", "speculators")],
    *[(to, "eagle3", {"norm_before_fc": True, "norm_output": True}) for to in ("vllm", "speculators")],
    ("llamacpp", "eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    ("speculators", "eagle3", {"num_layers": 3, "attention_bias": True, "taps": (1, 2, 5, 7)}),
    ("eagle", "eagle", {"num_layers": 2, "fc_bias": True}),
    ("sglang", "eagle", {"fc_bias": True}),
    ("vllm", "medusa", {"num_heads": 2, "num_layers": 2, "draft_vocab_size": 30}),
    ("trtllm", "medusa", {"num_heads": 2, "num_layers": 3}),
    ("hydra", "hydra", {"prefix_layer": True, "num_heads": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options"), CASES)
def test_export_then_import_is_identity(to, kind, options, base, tmp_path):
    assert_comes_back(made(base, kind, **options), to, base, tmp_path)


def assert_comes_back(model, to, base, tmp_path):
    """Bit for bit through export and import, and the files through import and export."""
    model.export(tmp_path / "a", to)
    again = imported(tmp_path / "a", base)
    assert same(again.head_state_dict(), model.head_state_dict())
    training = {
        name: getattr(model.head.config, name)
        for name in ("steps", "decay", "noise")
        if hasattr(model.head.config, name)
    }
    assert replace(again.head.config, **training) == model.head.config
    again.export(tmp_path / "b", to)
    for path in (tmp_path / "a").iterdir():
        if path.name not in ("README.md", "trtllm.yml") and path.suffix != ".pt":
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert same(tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b"))


WRITERS = {
    "eagle3": foreign.eagle3, "eagle": foreign.eagle, "medusa": foreign_depths.medusa, "hydra": foreign_depths.hydra,
}  # fmt: skip
THEIRS = [
    ("eagle", "eagle3", {"form": "eagle"}), ("vllm", "eagle3", {"form": "specforge", "nested": [0, 2, 5]}),
    ("sglang", "eagle3", {"form": "sglang", "draft": 97}),
    ("speculators", "eagle3", {"form": "speculators", "top": [2, 3, 4]}),
    ("modelopt", "eagle3", {"form": "modelopt"}), ("medusa", "medusa", {"form": "v1"}),
    ("trtllm", "medusa", {"form": "trtllm", "layers": 2}), ("vllm", "medusa", {"form": "vllm"}),
    ("eagle", "eagle", {"form": "eagle"}), ("sglang", "eagle", {"form": "sglang", "bias": False}),
    ("hydra", "hydra", {"layers": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options"), THEIRS)
def test_import_then_export_gives_their_tensors_back(to, kind, options, base, tmp_path):
    if kind == "eagle" or options.get("form") == "speculators":
        options = {**options, "embed": embeddings(base)}
    tensors = WRITERS[kind](tmp_path / "theirs", **options)
    model = imported(tmp_path / "theirs", base)
    model.export(tmp_path / "ours", to)
    assert same(tensors_in(tmp_path / "ours"), tensors)
    assert same(imported(tmp_path / "ours", base).head_state_dict(), model.head_state_dict())


@pytest.mark.parametrize("to", EAGLE3)
def test_an_exported_eagle3_head_drafts_by_their_forward_what_it_drafts_here(to, base, tmp_path):
    taps = (2, 4, 5) if to == "eagle" else CUSTOM
    model = made(base, "eagle3", draft_vocab_size=40, taps=taps)
    model.export(tmp_path / "out", to)
    tensors = tensors_in(tmp_path / "out")
    options = (tmp_path / "out" / "trtllm.yml").read_text() if to == "trtllm" else ""
    layers = foreign.layers_read(to, json.loads((tmp_path / "out" / "config.json").read_text()), options)
    assert layers == list(taps)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    ids = torch.arange(40) + tensors["d2t"]
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, prefix, s, layers, embeddings(base), t, d),
        ids,
    )


NORMS = {
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "norm_features": "fc_norm",
    "norm_output": "norm_output",
}  # fmt: skip


@pytest.mark.parametrize("option", NORMS)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_an_exported_eagle3_head_with_other_norms_drafts_by_their_forward(to, option, base, tmp_path):
    model = made(base, "eagle3", draft_vocab_size=40, **{option: True})
    model.export(tmp_path / "out", to)
    tensors, config = tensors_in(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    flags = [flag for flag in NORMS.values() if config.get(flag)]
    assert flags == [NORMS[option]]
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(tensors, prefix, s, (2, 4, 5), embeddings(base), t, d, flags),
        torch.arange(40) + tensors["d2t"],
    )


@pytest.mark.parametrize("to", [engine for engine, kind in FORMS if kind == "eagle"])
def test_an_exported_eagle_head_drafts_by_their_forward_what_it_drafts_here(to, base, tmp_path):
    model = made(base, "eagle")
    model.export(tmp_path / "out", to)
    tensors, lm_head = tensors_in(tmp_path / "out"), base.get_output_embeddings().weight.detach()
    assert torch.equal(tensors["embed_tokens.weight"], embeddings(base))
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(tensors, s, embeddings(base), lm_head, t, d))


@pytest.mark.parametrize("to", [engine for engine, kind in FORMS if kind == "medusa"])
def test_an_exported_medusa_head_drafts_by_their_forward_what_it_drafts_here(to, base, tmp_path):
    model = made(base, "medusa", num_heads=3)
    model.export(tmp_path / "out", to)
    tensors = tensors_in(tmp_path / "out")
    assert_drafts(model, lambda s, t, d: foreign_depths.medusa_logits(tensors, s[-1][-1], None))


def test_vllm_drafts_of_all_rows_the_tokens_of_a_medusa_heads_draft_vocabulary(base, tmp_path):
    """vLLM 0.32 fails on shorter output matrices, and reads a map only where truncated_vocab_size is below V."""
    model = made(base, "medusa", num_heads=3, draft_vocab_size=40)
    with torch.no_grad():
        model.head.blocks[1][0].linear.bias.fill_(50)
        model.head.lm_heads[1].weight.abs_().neg_()  # its logits are all below 0, which rows of zeros would give
    model.export(tmp_path / "out", "vllm")
    tensors, config = tensors_in(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["truncated_vocab_size"] == config["vocab_size"] == len(tensors["lm_heads.0.weight"]) == 97

    def forward(states, tokens, drafted):
        logits = foreign_depths.medusa_logits(tensors, states[-1][-1], None)
        assert logits[1][tensors["token_map"]].max() < 0
        for own in logits:
            best = own.argmax()
            assert best in tensors["token_map"] and own[best] > own.sort().values[-2]
        return [own[tensors["token_map"]] for own in logits]

    assert_drafts(model, forward, tensors["token_map"])


@pytest.mark.parametrize("prefix", [False, True])
def test_an_exported_hydra_head_drafts_by_their_forward_what_it_drafts_here(prefix, base, tmp_path):
    model = made(base, "hydra", num_heads=3, num_layers=2, prefix_layer=prefix)
    model.export(tmp_path / "out", "hydra")
    tensors, own = tensors_in(tmp_path / "out"), base if prefix else None
    assert_drafts(model, lambda s, t, d: foreign_depths.hydra_logits(tensors, s, embeddings(base), t, d, base=own))


def config_of(model, to, folder):
    model.export(folder, to)
    return json.loads((folder / "config.json").read_text())


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
        (to, "eagle3", {option: True}, f"it has {option}, which its readers do not have; formats that can: .*vllm$")
        for to in EAGLE3
        for option in ("norm_features", "norm_before_fc", "norm_before_residual", "norm_output")
        if to not in ("vllm", "speculators")
        and (to, option) not in (("llamacpp", "norm_before_residual"), ("llamacpp", "norm_before_fc"))
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


def test_a_prefix_layer_with_plain_rope_does_not_go_where_scaled_positions_are_read(tmp_path):
    scaled = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    with pytest.raises(CheckpointError, match=r"the base's scaled positions \(linear\) are read; no format can$"):
        made(scaled, "hydra", num_heads=2, prefix_layer=True).export(tmp_path / "out", "hydra")
    made(scaled, "hydra", num_heads=2).export(tmp_path / "out", "hydra")


def test_a_head_with_adapters_on_its_base_is_not_exported_without_them(tmp_path):
    model = convert(tiny_llama(), "eagle3", lora={"r": 2, "lora_alpha": 4}, draft_vocab_size=40)
    assert engines_for(model) == []
    with pytest.raises(CheckpointError, match="merge the adapters into the base, save it, and put the head beside"):
        model.export(tmp_path / "out", "vllm")
    assert not list(tmp_path.iterdir())


def test_an_unknown_engine_is_refused_by_name(base, tmp_path):
    with pytest.raises(ValueError, match="unknown format to export to 'vlm'; did you mean 'vllm'"):
        made(base, "eagle3").export(tmp_path / "out", "vlm")
    assert len(ENGINES) == 12


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
    with pytest.raises(CheckpointError, match="has no place for the base's embeddings"):
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
    assert "Written for: " in text and "bonus token included: 3.28" in text
    (tmp_path / "head" / "results.json").write_text('{"eval_accepted_length": 3.5}')
    (tmp_path / "head" / "trainer_state.json").unlink()
    assert "bonus token included: 3.50" in (model.export(tmp_path / "out3", to) / "README.md").read_text()
    (tmp_path / "head" / "results.json").unlink()
    assert "was not recorded" in (model.export(tmp_path / "out2", to) / "README.md").read_text()
    if to in ("trtllm", "modelopt"):
        assert f"speculative_model: {tmp_path / 'out'}\n" in (tmp_path / "out" / "trtllm.yml").read_text()


@pytest.mark.parametrize("to", ["trtllm", "modelopt"])
def test_tensorrt_llm_is_told_of_other_layers_in_the_file_it_is_started_with(to, base, tmp_path):
    lines = "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 5\n  speculative_model: {out}\n"
    for taps, more in (((2, 4, 5), ""), (CUSTOM, "  eagle3_layers_to_capture: [0, 2, 5]\n")):
        out = tmp_path / str(len(more))
        made(base, "eagle3", taps=taps).export(out, to)
        assert (out / "trtllm.yml").read_text() == lines.format(out=out) + more


@pytest.mark.parametrize(
    ("kind", "engines", "least"),
    [("eagle3", EAGLE3, 2.5), ("eagle", ["eagle", "vllm", "sglang"], 2.5), ("medusa", ["vllm"], 1.3)],
)
def test_a_trained_head_accepts_as_much_when_it_comes_back(kind, engines, least, tmp_path):
    """Through every format that holds the shipped one, draft for draft."""
    folder = corpus.checkpoints_dir()
    model = SpecModel.from_pretrained(folder / kind, dtype=torch.float32)
    assert engines_for(model) == sorted(engines)
    ids = AutoTokenizer.from_pretrained(folder / "base")("def __init__(self, name", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    here = model.generate(ids, **options)
    assert here.statistics()["accepted_length"] > least
    for to in engines:
        model.export(tmp_path / to, to)
        back = imported(tmp_path / to, model.base).generate(
            ids, **options, tree=model.head.default_plan(model.device, False)
        )
        assert torch.equal(here.sequences, back.sequences), to
        assert [step.accepted for step in back.steps] == [step.accepted for step in here.steps], to
