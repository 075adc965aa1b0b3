"""Claims about heads for bases whose embedding module scales its rows (Gemma): other programs give theirs the rows,
heads here read what the module gives."""

from __future__ import annotations

import pytest
import torch
import transformers

from specheads import CheckpointError, SpecModel
from tests.reference import foreign
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import FORMS, made, tensors_in
from tests.support.tiny_models import tiny_llama


def gemma(name="Gemma"):
    torch.manual_seed(0)
    sizes = tiny_llama().config.to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    others = ("num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    options = {key: sizes[key] for key in (*kept, *others)}
    return getattr(transformers, f"{name}ForCausalLM")(
        config(**options, head_dim=foreign.HEAD_DIM, initializer_range=0.3)
    ).eval()


def assert_reads_rows(model, tensors, base):
    lm_head = base.get_output_embeddings().weight.detach()
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(tensors, s, embeddings(base), lm_head, t, d))


@pytest.mark.parametrize("name", ["Gemma", "Gemma3"])
@pytest.mark.parametrize("to", [engine for engine, kind in FORMS if kind == "eagle"])
def test_an_exported_eagle_head_drafts_by_their_forward_what_it_drafts_here(to, name, tmp_path):
    base = gemma(name)
    model = made(base, "eagle")
    tensors = tensors_in(model.export(tmp_path / "out", to))
    assert torch.equal(tensors["embed_tokens.weight"], embeddings(base))
    assert_reads_rows(model, tensors, base)
    assert_reads_rows(SpecModel.from_pretrained(tmp_path / "out", base=base), tensors, base)


def test_a_published_eagle_head_drafts_what_its_own_forward_says(tmp_path):
    base = gemma()
    tensors = foreign.eagle(tmp_path, "vllm", embed=embeddings(base), bias=False)
    assert_reads_rows(SpecModel.from_pretrained(tmp_path, base=base), tensors, base)


@pytest.mark.parametrize(
    ("to", "kind", "options"),
    [
        ("dflash", "parallel", {"mask_token_id": 9, "sample_from_anchor": False, "causal": False, "markov_rank": 0}),
        ("hydra", "hydra", {"num_layers": 2}),
    ],
)
def test_a_head_that_cannot_be_written_for_scaled_rows_is_refused(to, kind, options, tmp_path):
    with pytest.raises(CheckpointError, match=r"multiplies its embeddings by 5\.66"):
        made(gemma(), kind, **options).export(tmp_path / "out", to)
    made(tiny_llama(), kind, **options).export(tmp_path / "out", to)
