"""Claims about EAGLE heads that lack a matrix or have biases: without lm_head.weight they draft with the base's, where
servers do, and biases are read where the config says which there are, else refused by name."""

from __future__ import annotations

import pytest
import torch

from specheads import CheckpointError, SpecModel
from tests.reference import foreign, foreign_blocks, foreign_modelopt
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import imported, same
from tests.support.tiny_models import tiny_llama

USUAL = (2, 4, 5)


def output_of(base):
    return base.get_output_embeddings().weight.detach()


def written(folder, tensors, form="vllm", **changes):
    """The config of foreign.eagle3 and these tensors."""
    foreign.eagle3(folder, form, draft=97, **changes)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    return foreign.write(folder, None, tensors)


def headless(prefix="layers.0."):
    tensors = foreign.eagle3_tensors(prefix, draft=97)
    del tensors["lm_head.weight"]
    return tensors


def assert_eagle3_drafts(model, tensors, base, prefix="layers.0."):
    assert_drafts(
        model,
        lambda s, t, d: foreign.eagle3_logits(
            tensors, prefix, s, USUAL, embeddings(base), t, d, output=output_of(base)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("form", ["vllm", "specforge", "speculators", "modelopt"])
def test_a_head_without_an_output_matrix_drafts_with_the_bases(form, base, tmp_path):
    prefix = "midlayer." if form == "specforge" else "layers.0."
    tensors = written(tmp_path / "head", headless(prefix), form)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base)
    assert torch.equal(model.head.lm_head.weight, output_of(base))
    assert_eagle3_drafts(model, tensors, base, prefix)
    model.export(tmp_path / "out", "vllm")  # with the matrix, so that it is the same head beside any base
    assert same(imported(tmp_path / "out", base).head_state_dict(), model.head_state_dict())


def test_a_head_without_a_draft_vocabulary_in_its_config_drafts_all_tokens(base, tmp_path):
    """As SGLang wants a head that shares the target's matrix."""
    tensors = written(tmp_path, headless(), draft_vocab_size=None)
    assert_eagle3_drafts(SpecModel.from_pretrained(tmp_path, base=base), tensors, base)


def test_a_draft_vocabulary_without_an_output_matrix_is_refused(base, tmp_path):
    tensors = foreign.eagle3(tmp_path, "vllm")
    del tensors["lm_head.weight"]
    foreign.write(tmp_path, None, tensors)
    with pytest.raises(CheckpointError, match=r"it has no lm_head.weight and drafts 40 of 97 tokens; the base's"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_tied_embeddings_are_the_output_matrix_only_of_a_base_that_ties_them(base, tmp_path):
    tensors = written(tmp_path, headless(), tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"says tie_word_embeddings=true of a base whose output matrix is not"):
        SpecModel.from_pretrained(tmp_path, base=base)
    tied = tiny_llama(tie_word_embeddings=True)
    assert_eagle3_drafts(SpecModel.from_pretrained(tmp_path, base=tied), tensors, tied)


# --- Biases ---


@pytest.mark.parametrize(
    ("flags", "output"),
    [({"qkv_bias": True}, False), ({"attention_bias": True}, True), ({"attention_bias": True, "qkv_bias": True}, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eagle3_head_with_biases_in_its_attention_drafts_what_its_own_forward_says(
    flags, output, dtype, base, tmp_path
):
    tensors = foreign.eagle3_tensors("layers.0.", draft=97) | foreign_modelopt.biases("layers.0.", output)
    tensors = {n: t.to(dtype) for n, t in tensors.items()}
    written(tmp_path, tensors, **flags)
    model = SpecModel.from_pretrained(tmp_path, base=base, dtype="auto")
    assert model.head.dtype == dtype
    if dtype == torch.float32:
        assert_eagle3_drafts(model, tensors, base)
    else:
        assert model.head.blocks[0].o_proj.bias.any() == output


@pytest.mark.parametrize("form", ["eagle", "vllm"])
def test_an_eagle_head_with_biases_on_queries_keys_and_values_drafts_what_its_own_forward_says(form, base, tmp_path):
    tensors = foreign.eagle(tmp_path, form, embed=embeddings(base), qkv_bias=True)
    tensors |= foreign_modelopt.biases("layers.0.")
    foreign.write(tmp_path, None, tensors, "pytorch_model.bin" if form == "eagle" else "model.safetensors")
    model = SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=True)
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(tensors, s, embeddings(base), output_of(base), t, d))


@pytest.mark.parametrize(
    ("flags", "output", "message"),
    [
        ({}, False, r"unknown layers.0.self_attn.k_proj.bias, layers.0.self_attn.q_proj.bias"),
        ({"attention_bias": True}, False, r"missing layers.0.self_attn.o_proj.bias"),
        ({"qkv_bias": True}, True, r"unknown layers.0.self_attn.o_proj.bias"),
        (
            {"attention_bias": True, "qkv_bias": False},
            True,
            r"says attention_bias=true and qkv_bias=false; its readers",
        ),
        ({"qkv_bias": "yes"}, False, r"qkv_bias='yes'; expected true or false"),
    ],
)
def test_biases_that_the_config_does_not_say_are_refused_by_name(flags, output, message, base, tmp_path):
    tensors = foreign.eagle3_tensors("layers.0.", draft=97) | foreign_modelopt.biases("layers.0.", output)
    written(tmp_path, tensors, **flags)
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_form_whose_readers_do_not_know_them_refuses_biases_on_queries_keys_and_values(base, tmp_path):
    foreign_blocks.head(tmp_path, "z-lab", qkv_bias=True)
    with pytest.raises(CheckpointError, match=r"qkv_bias=true, which readers of qwen3's block do not know"):
        SpecModel.from_pretrained(tmp_path, base=base)
