"""Claims about writing heads for other programs: what is written is what their forward drafts with, and comes back bit
for bit."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from specheads import SpecModel
from specheads.data import corpus
from specheads.models.formats.export.exporting import engines_for
from tests.reference import foreign, foreign_depths
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import CUSTOM, EAGLE3, FORMS, USUAL, assert_comes_back, imported, made, same, tensors_in

NORMED = ("vllm", "speculators", "sglang", "trtllm")
CASES = [
    *[(engine, kind, USUAL[kind]) for engine, kind in FORMS],
    *[(engine, "eagle3", {"draft_vocab_size": 97, "taps": CUSTOM}) for engine in EAGLE3 if engine != "eagle"],
    *[("vllm", kind, {"num_layers": 2, "attention_bias": True, "mlp_bias": True}) for kind in ("eagle", "eagle3")],
    *[(to, "eagle3", {"norm_features": True, "norm_before_residual": True}) for to in ("vllm", "speculators")],
    *[(to, "eagle3", {"norm_before_fc": True, "norm_output": True}) for to in NORMED],
    *[(to, "eagle3", {"norm_features": True, "taps": CUSTOM}) for to in ("sglang", "trtllm")],
    ("llamacpp", "eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    ("speculators", "eagle3", {"num_layers": 3, "attention_bias": True, "taps": (1, 2, 5, 7)}),
    ("eagle", "eagle", {"num_layers": 2, "fc_bias": True}),
    ("sglang", "eagle", {"fc_bias": True}),
    ("vllm", "medusa", {"num_heads": 2, "num_layers": 2, "draft_vocab_size": 30}),
    ("trtllm", "medusa", {"num_heads": 2, "num_layers": 3}),
    ("hydra", "hydra", {"prefix_layer": True, "num_heads": 2}),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("to", "kind", "options"), CASES)
def test_export_then_import_is_identity(to, kind, options, base, tmp_path):
    assert_comes_back(made(base, kind, **options), to, base, tmp_path)


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


@pytest.mark.parametrize(
    ("to", "option"),
    [(to, option) for to in NORMED for option in NORMS if option != "norm_before_residual" or to not in NORMED[2:]],
)
def test_an_exported_eagle3_head_with_other_norms_drafts_by_their_forward(to, option, base, tmp_path):
    model = made(base, "eagle3", draft_vocab_size=40, **{option: True})
    model.export(tmp_path / "out", to)
    tensors, config = tensors_in(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    flags = foreign.norms_read(to, config)
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


@pytest.mark.parametrize(
    ("kind", "engines", "least"),
    [
        ("eagle3", ["llamacpp", "speculators", "vllm"], 2.5),
        ("eagle", ["eagle", "vllm", "sglang"], 2.5),
        ("medusa", ["vllm"], 1.3),
    ],
)
def test_a_trained_head_accepts_as_much_when_it_comes_back(kind, engines, least, tmp_path):
    """Through every format that holds the shipped one, draft for draft."""
    folder = corpus.checkpoints_dir()
    model = SpecModel.from_pretrained(folder / kind, dtype=torch.float32)
    assert engines_for(model.config, model.base, model.head) == sorted(engines)
    ids = AutoTokenizer.from_pretrained(folder / "base")("def __init__(self, name", return_tensors="pt")["input_ids"]
    options = {"draft": "head", "max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    here = model.generate(ids, **options)
    assert here.statistics()["accepted_length"] > least
    for to in engines:
        model.export(tmp_path / to, to)
        back = imported(tmp_path / to, model.base).generate(
            ids, **options, tree=model.head.default_plan(model.device, False)
        )
        assert torch.equal(here.sequences, back.sequences), to
        assert [step.accepted for step in back.steps] == [step.accepted for step in here.steps], to
