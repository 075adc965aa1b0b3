"""Claims about heads that draft a block at once, in and out: DFlash, JetSpec and DSpark. What they draft is what their
own forward says (tests/reference/foreign_blocks.py). They come back bit for bit; what a form cannot hold is refused."""

from __future__ import annotations

import json

import pytest
import torch

from specheads import CheckpointError, SpecModel, chain
from specheads.models.formats.export.exporting import engines_for
from tests.reference import foreign_blocks
from tests.reference.foreign_blocks import FORMS, MARKED
from tests.reference.foreign_rope import SCALED
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import assert_comes_back, imported, made, same, tensors_in
from tests.support.tiny_models import tiny_llama

DSPARK = {
    "causal": False, "mask_token_id": 9, "block_size": 4, "draft_depth": 4, "taps": (1, 4, 6), "markov_rank": 6,
    "confidence": True,
}  # fmt: skip
DFLASH = {**DSPARK, "sample_from_anchor": False, "markov_rank": 0, "confidence": False}
JETSPEC = {**DFLASH, "causal": True}
DFLASH2 = {
    **DFLASH, "markov_rank": 6, "markov_type": "selector", "candidates": 5, "conv_taps": 2, "conv_group": 8,
}  # fmt: skip
DOMINO = {**DFLASH, "markov_rank": 6, "markov_type": "domino", "gru_size": 10}
GATED, RNN = ({**DSPARK, "markov_type": kind, "confidence_markov": kind == "rnn"} for kind in ("gated", "rnn"))
NARROW, SHORT = {"draft_vocab_size": 40}, {"num_layers": 1, "attention_bias": True}
OF_DFLASH = ["dflash", "llamacpp", "openvino", "sglang", "speculators", "trtllm", "vllm"]
LLAMA3 = {"rope_theta": None, "rope_parameters": SCALED["llama3"]}
# Where a head goes, and in whose form it is then.
HELD = [
    ("speculators", "dspark", DSPARK), ("speculators", "dspark", {**DSPARK, **NARROW}),
    ("speculators", "dspark", {**DSPARK, "sample_from_anchor": False}),
    ("speculators", "dspark", {**DSPARK, **SHORT, "markov_rank": 0, "confidence": False}),
    ("speculators", "dflash", DFLASH), ("speculators", "dflash", {**DFLASH, **NARROW, **SHORT}),
    ("dflash", "z-lab", DFLASH), ("dflash", "z-lab", {**DFLASH, **SHORT}),
    *[(to, "z-lab", {**DFLASH, **SHORT}) for to in ("sglang", "trtllm", "openvino")], ("llamacpp", "z-lab", DFLASH),
    ("vllm", "deepspec", DSPARK), ("vllm", "deepspec", {**DSPARK, **NARROW, "confidence": False}),
    ("sglang", "deepspec", {**DSPARK, **SHORT}), ("llamacpp", "deepspec", {**DSPARK, **NARROW}),
    ("vllm", "z-lab", DFLASH), ("vllm", "z-lab", {**DFLASH, **NARROW}), ("vllm", "jetspec", JETSPEC),
    ("jetspec", "jetspec", JETSPEC), ("deepspec", "deepspec", DSPARK),
    *[(to, "deepspec", options) for to in ("deepspec", "sglang") for options in (GATED, RNN)],
    *[("speculators", "dspark", options) for options in (GATED, RNN)],
    ("vllm", "deepspec", {**DSPARK, "confidence_markov": False}),
    *[(to, "dflash2", DFLASH2) for to in ("dflash", "vllm", "sglang")], ("speculators", "dflash2-sp", DFLASH2),
    ("sglang", "domino", DOMINO), ("sglang", "domino", {**DOMINO, "sample_from_anchor": True}),
    ("deepspec", "deepspec", {**DSPARK, "markov_rank": 0, "confidence": False}),
]  # fmt: skip


TITLES = {
    "dspark": "speculators DSpark", "dflash": "speculators DFlash", "jetspec": "JetSpec",
    **dict.fromkeys(("deepspec", "specforge", "normalised"), "DSpark in DeepSpec's format"),
    "dflash2": "DFlash 2 (z-lab", "dflash2-sp": "speculators DFlash 2", "domino": "Domino for SGLang",
}  # fmt: skip


def lm_head_of(base):
    return base.get_output_embeddings().weight.detach()


def assert_drafts_as_theirs(model, form, tensors, base, predicts_next=None):
    narrow = "d2t" in tensors
    lm_head, ids = tensors["lm_head.weight"] if narrow else lm_head_of(base), None
    if narrow:
        ids = torch.arange(40) + tensors["d2t"]
    assert_drafts(
        model,
        lambda s, t, d: foreign_blocks.logits(tensors, form, s, embeddings(base), lm_head, t, d, predicts_next),
        ids,
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in FORMS), ("dspark", {"draft": 40}), ("dspark", {"rank": 0, "confidence": False}),
        ("dspark", {"confidence": False, "layers": 1}), ("dspark", {"sample_from_anchor": False}),
        ("dflash", {"draft": 40, "layers": 1}), ("dflash", {"sample_from_anchor": True}), ("z-lab", {"layers": 3}),
        ("z-lab", {"block_size": None, "inner": {"block_size": 4}}), ("modelopt", {"inner": {"causal": None}}),
        ("deepspec", {"rank": 0, "confidence": False}), ("specforge", {"confidence": False, "layers": 1}),
        ("normalised", {"block_size": None, "inner": {"block_size": 4}}),
        *((form, {"markov": kind}) for form in ("dspark", "deepspec", "specforge") for kind in ("gated", "rnn")),
        ("dspark", {"markov": "gated", "confidence_head_with_markov": False}), ("dflash2", {"layers": 1}),
        ("domino", {"inner": {"shift_label": False}, "sample_from_anchor": False}),
        ("domino", {"architectures": ["DFlashDraftModel"], "emb_dim": None}),
    ],
)  # fmt: skip
def test_a_head_drafts_what_its_own_forward_says(form, options, base, tmp_path, hf_log):
    tensors = foreign_blocks.head(tmp_path / "head", form, base=base, **options)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base)
    predicts_next = options.get("sample_from_anchor", form in (*MARKED, "domino"))
    config = model.head.config
    assert (model.head.layers, config.block_size, config.causal) == ((1, 4, 6), 4, form == "jetspec")
    assert config.sample_from_anchor == predicts_next and model.head.scored_depths == (4 if predicts_next else 3)
    assert [r for r in hf_log.records if f"holds {TITLES.get(form, 'DFlash (z-lab')}" in r.getMessage()]
    assert_drafts_as_theirs(model, form, tensors, base, predicts_next)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("to", "form", "options"), HELD)
def test_an_exported_head_drafts_by_their_forward_and_comes_back_bit_for_bit(to, form, options, base, tmp_path):
    model = made(base, "parallel", **options)
    model.export(tmp_path / "out", to)
    tensors, config = (tensors_in(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text()))
    assert layers_read(form, config) == [1, 4, 6]
    assert_drafts_as_theirs(model, form, tensors, base, options.get("sample_from_anchor", True))
    assert_comes_back(model, to, base, tmp_path)


@pytest.mark.parametrize(
    ("to", "form", "options"),
    [
        ("speculators", "dspark", {"draft": 40}), ("speculators", "dflash", {}), ("dflash", "z-lab", {}),
        ("vllm", "modelopt", {}), ("jetspec", "jetspec", {}), ("deepspec", "deepspec", {}), ("dflash", "dflash2", {}),
        ("speculators", "dflash2-sp", {}), ("sglang", "domino", {}), ("sglang", "specforge", {"markov": "rnn"}),
    ],
)  # fmt: skip
def test_import_then_export_gives_their_tensors_back(to, form, options, base, tmp_path):
    tensors = foreign_blocks.head(tmp_path / "theirs", form, base=base, **options)
    model = imported(tmp_path / "theirs", base)
    model.export(tmp_path / "ours", to)
    assert same(tensors_in(tmp_path / "ours"), tensors)
    assert same(imported(tmp_path / "ours", base).head_state_dict(), model.head_state_dict())


def layers_read(form, config):
    """hidden_states that the readers of a form feed the head."""
    if form in ("dspark", "dflash", "dflash2-sp"):  # speculators, and vLLM of what it wrote
        return config["aux_hidden_state_layer_ids"]
    table = config if form == "deepspec" else config["dflash_config"]
    return [i + 1 for i in table["target_layer_ids"]]  # z-lab, JetSpec, ModelOpt, DeepSpec and vLLM: of outputs


def test_the_configs_are_those_of_the_tables(base, tmp_path):
    def config_of(options, to):
        made(base, "parallel", **options).export(tmp_path / to, to)
        return json.loads((tmp_path / to / "config.json").read_text())

    block = {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 12, "rope_theta": 500.0, "block_size": 4}
    for to, options, causal in (
        ("dflash", DFLASH, {"causal": False}), ("vllm", DFLASH, {"causal": False}),
        ("jetspec", JETSPEC, {"causal": True, "causal_head": True}),
    ):  # fmt: skip
        config = config_of(options, to)
        assert config["architectures"] == ["DFlashDraftModel"] and block.items() <= config.items()
        assert config["dflash_config"] == {"mask_token_id": 9, "target_layer_ids": [0, 3, 5], **causal}
        assert config["num_target_layers"] == 8 and "draft_vocab_size" not in config
        assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & set(tensors_in(tmp_path / to))
    deepspec = config_of(DSPARK, "deepspec")
    marks = {"target_layer_ids": [0, 3, 5], "mask_token_id": 9, "markov_rank": 6, "markov_head_type": "vanilla"}
    assert deepspec["architectures"] == ["Qwen3DSparkModel"] and (block | marks).items() <= deepspec.items()
    assert deepspec["enable_confidence_head"] and deepspec["confidence_head_with_markov"]
    stored = tensors_in(tmp_path / "deepspec")
    assert torch.equal(stored["embed_tokens.weight"], embeddings(base))
    assert torch.equal(stored["lm_head.weight"], lm_head_of(base))
    speculators = config_of(DFLASH, "speculators")
    # vLLM makes every layer causal where it says false, whatever sliding layers there are.
    assert speculators["sliding_window_non_causal"] is True and speculators["sample_from_anchor"] is False
    assert speculators["speculators_model_type"] == "dflash" and "markov_rank" not in speculators
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


SERVED = {
    "speculators": '"method": "dflash", "model": "{out}", "num_speculative_tokens": 3',
    "dflash": "--speculative-draft-model-path {out} --speculative-num-draft-tokens 4",
    "vllm": '"method": "dflash", "model": "{out}", "num_speculative_tokens": 3', "jetspec": 'load_draft_head("{out}")',
    "deepspec": '"method": "dspark", "model": "{out}", "num_speculative_tokens": 4',
}  # fmt: skip


@pytest.mark.parametrize("to", SERVED)
def test_the_readme_has_the_whole_block_drafted(to, base, tmp_path):
    options = {"jetspec": JETSPEC, "deepspec": DSPARK}.get(to, DFLASH)
    model = made(base, "parallel", **{**options, "draft_depth": 2})
    text = (model.export(tmp_path / "out", to) / "README.md").read_text()
    assert SERVED[to].format(out=tmp_path / "out") in text and "$" not in text


# --- What is refused ---

THEIRS_REFUSED = [
    ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm'; heads here have vanilla, gated, rnn ones"),
    ("dspark", {"markov_head_type": "rnn"}, "missing markov_head.joint_proj"),
    ("dspark", {"aux_hidden_state_layer_ids": None}, "its config has no aux_hidden_state_layer_ids"),
    ("dspark", {"mask_token_id": None}, "mask_token_id=None; expected a whole number"),
    ("dspark", {"mask_token_id": 97}, "mask_token_id=97 is no token"),
    ("dspark", {"block_size": 2**20}, "block_size=1048576 is more than any draft"),
    ("dspark", {"markov_rank": 4}, "markov_head.markov_w1.weight has shape"),
    (
        "dspark",
        {"speculators_model_type": "dflash"},
        "of the class 'DSparkDraftModel', which speculators DFlash does n",
    ),
    (
        "dspark",
        {"speculators_model_type": "dflash2"},
        "of the class 'DSparkDraftModel', which speculators DFlash 2 does n",
    ),
    ("dflash2", {"inner": {"selector_rank": None}}, "selector_rank=None; expected a whole number"),
    ("dflash2", {"inner": {"conv_group_size": 7}}, "conv_group=7 must divide hidden_size"),
    ("dflash2", {"inner": {"selector_top_k": 98}}, "candidates=98 exceeds the 97 tokens"),
    ("dflash2", {"architectures": ["MiniMaxDFlash2DraftModel"]}, "of the class 'MiniMaxDFlash2DraftModel'"),
    ("dflash2", {"inner": {"input_embedding_scale": 2.0}}, r"reads embeddings times 2 \(input_embedding_scale\)"),
    ("dflash2", {"layer_types": ["sliding_attention"] * 2}, "'sliding_attention'"),
    ("domino", {"emb_dim": 8}, r"emb_dim=\[6, 8\]; expected one"),
    ("domino", {"inner": {"projector_type": "dspark"}}, "projector_type='dspark'; expected domino"),
    (
        "dspark",
        {"speculators_model_type": "ours", "architectures": []},
        "of type 'ours'; eagle, eagle3, peagle, mtp, dflash, dflash2 and d",
    ),
    ("dflash", {"block_size": 1}, "one slot"),
    (
        "dflash",
        {"speculators_model_type": "dspark", "architectures": None, "markov_rank": 0},
        "missing confidence_head.proj.bias",
    ),
    ("z-lab", {"architectures": ["MiMoDFlashDraftModel"]}, "of the class 'MiMoDFlashDraftModel', which DFlash"),
    ("z-lab", {"inner": {"attention_sink_bias": True}}, "attention_sink_bias=true"),
    ("z-lab", {"inner": {"projector_type": "other"}}, "projector_type='other'"),
    ("z-lab", {"inner": {"target_hidden_size": 64}}, r"features of 64 values \(target_hidden_size\)"),
    ("z-lab", {"inner": {"sample_from_anchor": True}}, "sample_from_anchor=true, which readers"),
    ("z-lab", {"inner": {"target_layer_ids": None}}, "its config has no target_layer_ids"),
    ("z-lab", {"inner": {"target_layer_ids": [0, 3, 8]}}, r"reads hidden_states \[10\], and servers capture only"),
    ("z-lab", {"inner": {"mask_token_id": None}}, "mask_token_id=None"),
    ("z-lab", {"block_size": None}, "its config has no block_size"),
    ("z-lab", {"inner": {"block_size": 8}}, r"its config has block_size=\[4, 8\]; expected one"),
    ("z-lab", {"is_neox_style": False}, "is_neox_style=false"),
    ("z-lab", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("z-lab", {"is_causal": False, "inner": {"causal": True}}, "is_causal=false, causal=true;"),
    ("jetspec", {"inner": {"causal": False}}, "causal=false, causal_head=true; its readers would disagree"),
    ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, r"of the class \['Gemma4DSparkModel'\]"),
    ("normalised", {"mask_token_id": 8}, "says mask_token_id=8, and dflash_config.mask_token_id=9; its readers"),
    ("normalised", {"inner": {"target_layer_ids": None}}, "its config has no target_layer_ids"),
    ("specforge", {"inner": {"projector_type": "domino"}}, "projector_type='domino'; expected dspark"),
    ("specforge", {"inner": {"attention_mode": "mla"}}, "dflash_config.attention_mode='mla'; expected gqa"),
    ("specforge", {"architectures": ["Qwen3DSpark2"]}, "class .*; Qwen3DSparkModel and DSparkDraftModel are read here"),
    ("deepspec", {"target_layer_ids": [-1, 3]}, r"reads hidden_states \[0\]"),
    ("deepspec", {"markov_rank": None}, "markov_rank=None"),
]


@pytest.mark.parametrize(("form", "changes", "message"), THEIRS_REFUSED)
def test_a_head_that_cannot_be_held_is_refused(form, changes, message, base, tmp_path):
    foreign_blocks.head(tmp_path, form, base=base, **changes)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


@pytest.mark.parametrize("form", ["z-lab", "dflash2"])
def test_a_mask_embedding_beside_the_head_takes_the_place_of_the_mask_tokens(form, base, tmp_path):
    own = torch.randn(32, generator=torch.Generator().manual_seed(3))
    for name, values in (("a", own), ("b", {"mask_token_id": 9, "embedding": own})):
        tensors = foreign_blocks.head(tmp_path / name, form)
        torch.save(values, tmp_path / name / "mask_embedding.pt")
        model = imported(tmp_path / name, base)
        assert torch.equal(model.head.mask_embed.weight[0], own) and model.head.config.mask_token_id == 9
    embed = embeddings(base).clone()
    embed[9] = own
    assert_drafts(model, lambda s, t, d: foreign_blocks.logits(tensors, form, s, embed, lm_head_of(base), t, d))
    assert engines_for(model.config, base, model.head) == ["dflash", "sglang", "vllm"]
    for to in ("dflash", "sglang", "vllm"):
        model.export(tmp_path / to, to)
        again = imported(tmp_path / to, base)
        assert again.head.config == model.head.config and same(again.head_state_dict(), model.head_state_dict())


def test_a_wrong_mask_embedding_and_matrices_of_another_base_are_refused(base, tmp_path):
    own = torch.randn(32)
    for said, values in (
        ("is damaged", b"pickle"), ("for each slot", {"embedding": own, "per_position": True}),
        ("of token 8, and the config's mask_token_id=9", {"mask_token_id": 8, "embedding": own}),
        ("'embedding' is not a plain tensor", {}),
        (r"is \(31,\) of torch.float32, not 32 values", own[1:]), ("not 32 values", own.long()),
    ):  # fmt: skip
        foreign_blocks.head(tmp_path / "a", "z-lab")
        path = tmp_path / "a" / "mask_embedding.pt"
        path.write_bytes(values) if isinstance(values, bytes) else torch.save(values, path)
        with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is a pickle, which can run code"):
            SpecModel.from_pretrained(tmp_path / "a", base=base)
        with pytest.raises(CheckpointError, match=said):
            imported(tmp_path / "a", base)
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    foreign_blocks.head(tmp_path / "b", "deepspec", base=other)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the base's matrix"):
        SpecModel.from_pretrained(tmp_path / "b", base=base)


OURS_REFUSED = [
    ("speculators", {**DSPARK, "causal": True}, r"attend only to earlier ones \(causal\).*no format can$"),
    ("speculators", JETSPEC, r"DFlash cannot hold .*\(causal\).*DSpark cannot hold .*that can: jetspec, vllm$"),
    ("speculators", {**DSPARK, "mask_token_id": None}, "slots after the root read an embedding of its own"),
    ("speculators", {**DFLASH, "mlp_bias": True}, "biases in the MLP, which Qwen3's lacks; no format can$"),
    (
        "dflash",
        DSPARK,
        "Markov bias and a confidence, which this format cannot hold.*: deepspec, llamacpp, sglang, speculators, vllm$",
    ),
    *[(to, {**DSPARK, "markov_rank": 0}, r"no Markov bias \(markov_rank=0\)") for to in ("vllm", "sglang", "llamacpp")],
    ("llamacpp", {**DFLASH, "attention_bias": True}, "its attention has biases, which its readers do not have"),
    ("llamacpp", {**DFLASH, **LLAMA3}, "rope_type llama3.*, and its readers have linear, yarn"),
    ("sglang", {**DFLASH, **NARROW}, "drafts 40 of 97 tokens, and .*formats that can: speculators, vllm$"),
    *[(to, JETSPEC, "formats that can: jetspec, vllm$") for to in ("sglang", "trtllm", "llamacpp", "openvino")],
    ("openvino", DSPARK, "a Markov bias and a confidence"),
    ("trtllm", DSPARK, "a Markov bias and a confidence"),
    ("dflash", {**DFLASH, **NARROW}, "drafts 40 of 97 tokens, and .*formats that can: speculators, vllm$"),
    ("dflash", JETSPEC, "formats that can: jetspec, vllm$"),
    ("jetspec", DFLASH, rf"both ways \(causal=false\).*formats that can: {', '.join(OF_DFLASH)}$"),
    (
        "dflash",
        {**DFLASH, "sample_from_anchor": True},
        "predict the position after their own .*deepspec, speculators$",
    ),
    (
        "deepspec",
        {**DSPARK, "sample_from_anchor": False},
        "predict their own position .*can: speculators$",
    ),
    ("dflash", {**DFLASH, "taps": (1, 4, 8)}, r"reads hidden_states \[8\].*no format can$"),
    *[(to, DFLASH2, "formats that can: dflash, llamacpp, sglang, speculators, vllm$") for to in ("trtllm", "openvino")],
    ("llamacpp", {**DFLASH2, "candidates": 9}, "9 candidates make 90 scores a slot"),
    ("dflash", DOMINO, "a bias of type domino, which this format cannot hold.*formats that can: sglang$"),
    ("sglang", {**DOMINO, "plain_drafts": 0}, r"leaves 0 drafts as they are \(plain_drafts\)"),
    ("sglang", {**DFLASH2, "conv_taps": 0}, r"blocks have no convolutions \(conv_taps\)"),
    ("dflash", {**DFLASH, "conv_taps": 2, "conv_group": 8}, r"blocks have convolutions \(conv_taps\), and .*do not"),
    ("dflash", {**DFLASH, "logit_cap": 30.0}, "scales or caps its logits"),
    *[(to, GATED, "a bias of type gated") for to in ("vllm", "llamacpp")],
    ("modelopt", DFLASH, f"no form for a head of kind parallel; formats that can: {', '.join(OF_DFLASH)}$"),
]


@pytest.mark.parametrize(("to", "options", "message"), OURS_REFUSED)
def test_what_a_form_cannot_hold_is_refused_with_the_reason_and_what_can(to, options, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        made(base, "parallel", **options).export(tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


# --- What it is for ---


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        (DFLASH, OF_DFLASH),
        (JETSPEC, ["jetspec", "vllm"]),
        (DSPARK, ["deepspec", "llamacpp", "sglang", "speculators", "vllm"]),
        (DFLASH2, ["dflash", "llamacpp", "sglang", "speculators", "vllm"]),
        (DOMINO, ["sglang"]),
    ],
)
@pytest.mark.sampled(3)
def test_a_trained_head_accepts_as_much_when_it_comes_back_and_learns_on(options, engines, tmp_path):
    base = tiny_llama()
    text = base.generate(torch.tensor([[7], [31], [55]]), do_sample=False, max_new_tokens=40, min_new_tokens=40)
    model = made(base, "parallel", **options).train()
    taught(model, text, 40, 2e-2)
    here = decoded(model)
    assert here.statistics()["accepted_length"] > 1.5 and engines_for(model.config, model.base, model.head) == engines
    for to in engines:
        model.export(tmp_path / to, to)
        again = imported(tmp_path / to, base)
        back = decoded(again)
        assert torch.equal(here.sequences, back.sequences)
        assert [step.accepted for step in back.steps] == [step.accepted for step in here.steps], to
    before, after = taught(again.train(), text, 5, 1e-3)
    assert after < before


def taught(model, text, steps, rate):
    """The loss of the first step and of the last."""
    optimizer = torch.optim.AdamW([p for p in model.head.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(text, labels=text).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def decoded(model):
    model.eval()
    return model.generate(
        torch.tensor([[7]]), tree=chain(3), max_new_tokens=30, do_sample=False, return_dict_in_generate=True
    )
