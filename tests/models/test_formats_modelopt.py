"""Claims about heads that ModelOpt trained: both of its ways to name the decoder block, and every option of its table
eagle_config, are read, or refused by name and value."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from specheads import CheckpointError, SpecModel
from specheads.data import corpus
from tests.reference import foreign, foreign_modelopt
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import imported, made, same, tensors_in

USUAL = (2, 4, 5)


def output_of(base):
    return base.get_output_embeddings().weight.detach()


def assert_megatron_drafts(model, tensors, base, flags=(), layers=1):
    first, *later = [f"midlayer.{i}." for i in range(layers)] if layers > 1 else ["midlayer."]
    output, ids = output_of(base), torch.arange(40) + tensors["d2t"] if "d2t" in tensors else None

    def forward(states, tokens, drafted):
        return foreign.eagle3_logits(
            tensors, first, states, USUAL, embeddings(base), tokens, drafted, flags, later=later, output=output
        )

    assert_drafts(model, forward, ids)


@pytest.mark.parametrize(("draft", "layers"), [(97, 1), (40, 1), (97, 2), (40, 3)])
def test_a_megatron_export_drafts_what_its_own_forward_says(draft, layers, base, tmp_path, hf_log):
    tensors = foreign_modelopt.megatron(tmp_path, draft=draft, layers=layers)
    model = SpecModel.from_pretrained(tmp_path, base=base)
    assert [r for r in hf_log.records if "ModelOpt's EAGLE-3 export" in r.getMessage()]
    assert (model.head.layers, model.head.config.num_layers) == (USUAL, layers)
    assert_megatron_drafts(model, tensors, base, layers=layers)


def test_later_blocks_as_sglang_names_their_norm_are_read_too(base, tmp_path):
    named = {n.replace("midlayer.", "layers."): t for n, t in foreign_modelopt.tensors_of(40, 2).items()}
    foreign.write(tmp_path, foreign_modelopt.config_of(40, 2, eagle_config=None), named)
    tensors = {n.replace("layers.", "midlayer."): t for n, t in named.items()}
    assert_megatron_drafts(SpecModel.from_pretrained(tmp_path, base=base), tensors, base, layers=2)
    foreign.write(tmp_path, None, {**named, "layers.1.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"unknown layers.1.hidden_norm.weight"):  # readers take one or the other
        SpecModel.from_pretrained(tmp_path, base=base)


def test_an_export_under_the_other_names_is_the_same_head(base, tmp_path):
    model = made(base, "eagle3", draft_vocab_size=40)
    model.export(tmp_path / "a", "modelopt")
    config, tensors = json.loads((tmp_path / "a" / "config.json").read_text()), tensors_in(tmp_path / "a")
    foreign.write(tmp_path / "b", config, {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()})
    assert same(imported(tmp_path / "b", base).head_state_dict(), model.head_state_dict())


OURS = {
    "fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight", "d2t": "d2t",
    "hidden_norm.weight": "midlayer.hidden_norm.weight", "input_layernorm.weight": "midlayer.input_layernorm.weight",
    "blocks.0.post_attention_layernorm.weight": "midlayer.post_attention_layernorm.weight",
    **{f"blocks.0.{m}_proj.weight": f"midlayer.self_attn.{m}_proj.weight" for m in "qkvo"},
    **{f"blocks.0.{m}_proj.weight": f"midlayer.mlp.{m}_proj.weight" for m in ("gate", "up", "down")},
}  # fmt: skip


def test_the_shipped_head_under_megatron_names_drafts_the_same_tokens(tmp_path):
    """Its norm_before_residual, which ModelOpt's form has no key for, is where vLLM looks for it."""
    shipped = corpus.checkpoints_dir() / "eagle3"
    found = load_file(shipped / "model.safetensors")
    tensors = {theirs: found[f"head.{ours}"] for ours, theirs in OURS.items()}
    assert len(found) == len(tensors) + 1  # t2d
    head = json.loads((shipped / "config.json").read_text())["head"]
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = foreign_modelopt.config_of(
        head["draft_vocab_size"], inner={"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head["taps"]]},
        **{name: head[name] for name in (*sizes, "rms_norm_eps", "norm_before_residual")},
        rope_theta=head["rope_parameters"]["rope_theta"],
    )  # fmt: skip
    foreign.write(tmp_path, config, tensors)
    model = SpecModel.from_pretrained(shipped, dtype=torch.float32)
    theirs = SpecModel.from_pretrained(tmp_path, base=model.base, dtype="auto")
    assert same({n: t.bfloat16() if t.is_floating_point() else t for n, t in model.head_state_dict().items()},
                theirs.head_state_dict())  # fmt: skip
    theirs.head.to(torch.float32)
    tokenizer, plan = (
        AutoTokenizer.from_pretrained(shipped.parent / "base"),
        model.head.default_plan(model.device, False),
    )
    for text in ("def __init__(self, name", "The tree is built level by"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True, "tree": plan}
        one, other = model.generate(ids, **options), theirs.generate(ids, **options)
        assert torch.equal(one.sequences, other.sequences)
        assert [step.accepted for step in one.steps] == [step.accepted for step in other.steps]
        assert one.statistics()["accepted_length"] > 2.0


# --- eagle_config ---


@pytest.mark.parametrize(
    ("inner", "flags", "extra"),
    [
        ({"return_hidden_post_norm": True}, ("norm_output",), {}),
        ({"norm_before_fc": True}, ("norm_before_fc",), {"input_norm.weight": 96}),
        ({"norm_before_fc": True, "return_hidden_post_norm": True}, ("norm_before_fc", "norm_output"),
         {"input_norm.weight": 96}),
        ({"return_hidden_post_norm": False, "norm_before_fc": False}, (), {}),
        ({"next_layer_regular": False, "eagle_decoder_type": "llama", "has_lm_head": False}, (), {}),
        ({"use_aux_hidden_state": None, "use_mtp_layernorm": None, "parallel_draft_step": None}, (), {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["megatron", "hugging face"])
def test_options_of_eagle_config_draft_what_their_readers_draft(form, inner, flags, extra, base, tmp_path):
    tensors, make = foreign_modelopt.tensors_of(40), foreign.Random(19)
    tensors |= {name: make.norm(size) for name, size in extra.items()}
    swap = ("midlayer.", "layers.0.") if form == "hugging face" else ("", "")
    named = {n.replace(*swap): t for n, t in tensors.items()}
    foreign.write(tmp_path, foreign_modelopt.config_of(40, inner=inner), named)
    assert_megatron_drafts(SpecModel.from_pretrained(tmp_path, base=base), tensors, base, flags)


OTHERS = {
    "use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
    "use_mtp_layernorm": True, "eh_proj_before_attn": True, "parallel_draft_step": 4, "eagle_decoder_type": "kimik2",
    "norm_before_residual": True, "fc_norm": True, "norm_output": True, "use_aux_norm": True, "use_gate": False,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_option_of_eagle_config_is_refused_by_name_and_value(name, base, tmp_path):
    foreign_modelopt.megatron(tmp_path, inner={name: OTHERS[name]})
    value = str(OTHERS[name]).lower() if isinstance(OTHERS[name], bool) else repr(OTHERS[name])
    with pytest.raises(CheckpointError, match=rf"its head has eagle_config\.{name}={value}, which is not supported"):
        SpecModel.from_pretrained(tmp_path, base=base)


CONTRADICTIONS = {
    "norm_before_fc": (
        {"inner": {"norm_before_fc": True}, "norm_before_fc": False},
        r"says norm_before_fc=false, eagle_config.norm_before_fc=true;",
    ),
    "norm_output": (
        {"inner": {"return_hidden_post_norm": True}, "norm_output": False},
        r"says norm_output=false, eagle_config.return_hidden_post_norm=true",
    ),
    "at the top": ({"return_hidden_post_norm": True}, r"its head has return_hidden_post_norm=true"),
    "regular": ({"layers": 2, "inner": {"next_layer_regular": False}}, "eagle_config.next_layer_regular=false"),
    "no type": ({"inner": {"use_mtp_layernorm": "no"}}, "eagle_config.use_mtp_layernorm='no'"),
    "lm_head": ({"inner": {"has_lm_head": True}}, "eagle_config.has_lm_head=true, and it has no lm_head.weight"),
    "no tensor": ({"inner": {"norm_before_fc": True}}, "missing input_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_options_that_contradict_the_rest_are_refused(case, base, tmp_path):
    options, message = CONTRADICTIONS[case]
    foreign_modelopt.megatron(tmp_path, **options)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_an_eagle_1_head_of_modelopts_is_refused_by_what_it_is(base, tmp_path):
    foreign_modelopt.megatron(
        tmp_path, architectures=["LlamaForCausalLMEagle"], inner={"use_aux_hidden_state": False}
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"eagle_config\.use_aux_hidden_state=false"):
        SpecModel.from_pretrained(tmp_path, base=base)
