"""generate() and what a model is given besides ids: served as generate() serves it, or refused by name."""

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import specheads
from specheads import DraftModel, DynamicTree, PromptLookup, UnsupportedModel, convert
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.prompts import V, padded
from tests.support.tiny_models import tiny_llama
from tests.support.vision import IMAGE, VISION, llava

OPTIONS = {"do_sample": False, "max_new_tokens": 16}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", VISION)
def test_a_text_about_an_image_is_the_bases_own(family):
    """And another image gives another text. Rows are ragged, so that what is given per token is packed."""
    model, images, prompts = VISION[family]()
    inputs = padded(prompts)
    if "Qwen" in family or family == "Gemma-4":
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    if family in ("Gemma-3", "PaliGemma"):
        own = inputs["input_ids"] == IMAGE if family == "Gemma-3" else torch.zeros_like(inputs["input_ids"])
        inputs["token_type_ids"] = own.long()
    texts = []
    for sign in (1, -1):
        given = {**inputs, **images, "pixel_values": sign * images["pixel_values"]}
        texts.append(model.generate(**given, **OPTIONS))
        for drafter in (None, PromptLookup(4, width=2), convert(model, "eagle3").head):
            out = specheads.generate(model, **given, **OPTIONS, draft=drafter, return_dict_in_generate=True)
            assert torch.equal(out.sequences, texts[-1])
            assert (out.statistics()["drafted"] > 0) == (drafter is not None)
    assert not torch.equal(*texts), "the image makes no difference, so the test shows nothing"


def test_positions_that_are_given_are_kept():
    for several in [False, True]:
        base = tiny_llama(eos_token_id=None)
        prompts = [[27, 42, 22, 85, 13, 36], [44, 9]][: 1 + several]
        inputs = padded(prompts)
        columns = inputs["input_ids"].shape[1]
        positions = torch.stack([torch.arange(columns) * 2 + 7, torch.arange(columns) + 30])[: len(prompts)]
        plain = base.generate(**inputs, **OPTIONS)
        expected = base.generate(**inputs, position_ids=positions, **OPTIONS)
        assert not torch.equal(plain, expected)
        for drafter in (None, DraftModel(base), convert(base, "eagle3").head):
            tree = DynamicTree(8, 3, 3) if drafter is not None else None
            out = specheads.generate(base, **inputs, position_ids=positions, **OPTIONS, draft=drafter, tree=tree)
            assert torch.equal(out, expected)
        from_zero = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        assert torch.equal(specheads.generate(base, **inputs, position_ids=from_zero, **OPTIONS), plain)
        with pytest.raises(ValueError, match=r"position_ids= has shape \(3, 4\)"):
            specheads.generate(base, **inputs, position_ids=torch.zeros(3, 4, dtype=torch.long), **OPTIONS)


def test_token_types_are_kept():
    base = build("GPT2Config", {"n_positions": 64})
    inputs = padded([[27, 42, 22, 85, 13, 36], [44, 9]])
    types = torch.tensor([[3, 3, 4, 4, 5, 5], [3, 3, 3, 3, 8, 9]])
    expected = base.generate(**inputs, token_type_ids=types, **OPTIONS)
    assert not torch.equal(expected, base.generate(**inputs, **OPTIONS))
    for drafter in (None, DraftModel(base), PromptLookup(4, width=2)):
        tree = DynamicTree(8, 3, 3) if isinstance(drafter, DraftModel) else None
        out = specheads.generate(base, **inputs, token_type_ids=types, **OPTIONS, draft=drafter, tree=tree)
        assert torch.equal(out, expected)


def test_several_texts_of_one_image_share_it():
    model, images, prompts = llava()
    inputs = {**padded(prompts[:1]), "pixel_values": images["pixel_values"][:1]}
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3, "seed": 1}
    out = specheads.generate(model, **inputs, **options)
    assert out.shape[0] == 3
    assert torch.equal(out, specheads.generate(model, **inputs, **options, draft=PromptLookup(3)))


class Styled(LlamaForCausalLM):
    """Takes an argument of its own, which every pass reads."""

    def forward(self, *args, style=None, **kwargs):
        out = super().forward(*args, **kwargs)
        if style is not None:
            out.logits = out.logits + style
        return out


def test_what_cannot_be_served_is_refused_by_name():
    base = tiny_llama()
    styled = Styled(base.config).eval()
    styled.load_state_dict(base.state_dict())
    ids, style = torch.tensor([[5, 6, 7]]), torch.randn(V)
    assert not torch.equal(styled.generate(ids, style=style * 9, **OPTIONS), styled.generate(ids, **OPTIONS))
    with pytest.raises(ValueError, match=r"cannot serve style= of Styled.*leave it out"):
        specheads.generate(styled, ids, style=style, **OPTIONS)
    assert torch.equal(
        specheads.generate(styled, ids, style=None, **OPTIONS, draft=PromptLookup()), styled.generate(ids, **OPTIONS)
    )


def test_what_an_encoder_decoder_cannot_be_given_is_refused_by_name():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": V}
    base = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    encoded = BaseModelOutput(last_hidden_state=base.encoder(ids).last_hidden_state)
    expected = base.generate(ids, **OPTIONS)
    assert torch.equal(specheads.generate(base, encoder_outputs=encoded, draft=PromptLookup(), **OPTIONS), expected)
    with pytest.raises(ValueError, match=r"cannot serve decoder_inputs_embeds= of T5"):
        specheads.generate(base, ids, decoder_inputs_embeds=torch.zeros(1, 1, 16), **OPTIONS)


def test_ids_may_be_whole_numbers_of_any_width():
    base = tiny_llama()
    inputs = padded([[27, 42, 22, 85, 13, 36], [44, 9]])
    expected = base.generate(**inputs, **OPTIONS)
    inputs["input_ids"] = inputs["input_ids"].int()
    for drafter in (None, PromptLookup(4), convert(base, "eagle3").head):
        out = specheads.generate(base, **inputs, **OPTIONS, draft=drafter)
        assert out.dtype == torch.long and torch.equal(out, expected)
    assert torch.equal(convert(base, "medusa").generate(**inputs, **OPTIONS), expected)


@pytest.mark.parametrize("family", ["Mistral", "Llama-4", "Qwen3.5", "Llama"])
def test_masked_positions_between_tokens_are_left_out_and_said_where_that_differs(family, hf_log):
    """The window counts by them in transformers, and a state passes over them."""
    base = build(*{**FAMILIES, **RECURRENT}[family])
    whole = padded([[5, 17, 3, 88, 41, 9, 60, 12, 33, 71, 20, 44], [44, 9, 7]])
    specheads.generate(base, **whole, **OPTIONS)
    assert "masked positions" not in hf_log.text
    holes = {name: values.clone() for name, values in whole.items()}
    holes["attention_mask"][0, 3:8] = 0
    out = specheads.generate(base, **holes, **OPTIONS)
    left_out = padded([[5, 17, 3, 33, 71, 20, 44], [44, 9, 7]])
    assert torch.equal(out[:, 12:], specheads.generate(base, **left_out, **OPTIONS)[:, 7:])
    same = torch.equal(out, base.generate(**holes, **OPTIONS))
    assert same == (family == "Llama") == ("row 0 has masked positions between its tokens" not in hf_log.text)


def test_a_model_that_keeps_no_keys_is_refused():
    base = tiny_llama()
    getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)()
    ids = torch.tensor([[5, 6, 7]])
    expected = specheads.generate(base, ids, **OPTIONS)
    base.train()
    for call in (
        lambda: specheads.generate(base, ids, **OPTIONS),
        lambda: specheads.generate_many(base, [[5]], **OPTIONS),
    ):
        with pytest.raises(ValueError, match=r"gradient checkpointing keeps no keys.*call eval\(\) first"):
            call()
    assert torch.equal(specheads.generate(base.eval(), ids, **OPTIONS), expected)


def test_a_model_that_torch_wraps_is_refused_with_the_way_to_compile():
    wrapped = torch.compile(tiny_llama(), backend="eager")
    for call in (
        lambda: convert(wrapped, "medusa"),
        lambda: specheads.generate(wrapped, torch.tensor([[5]]), **OPTIONS),
    ):
        with pytest.raises(TypeError, match=r"wrapped by torch.compile\(\); give the model itself, and compile=True"):
            call()


def test_a_model_whose_config_has_return_dict_false_is_refused_everywhere():
    tuples = tiny_llama(return_dict=False)
    calls = (
        lambda: specheads.generate(tuples, torch.tensor([[5]]), **OPTIONS),
        lambda: DraftModel(tuples),
        lambda: convert(tuples, "medusa"),
    )
    for call in calls:
        with pytest.raises(UnsupportedModel, match=r"has return_dict=False.*set model.config.return_dict = True$"):
            call()


def uses_of(base):
    """Calls of all that takes a base."""
    return (
        lambda: specheads.generate(base, torch.tensor([[5, 6, 7]]), **OPTIONS, draft=PromptLookup()),
        lambda: DraftModel(base),
        lambda: convert(base, "medusa"),
        lambda: specheads.patch(base),
    )


@pytest.mark.parametrize("loader", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_without_a_language_model_head_is_refused_everywhere(loader, tmp_path):
    convert(tiny_llama(), "medusa", num_heads=2).save_pretrained(tmp_path / "head")
    tiny_llama().save_pretrained(tmp_path / "base")
    headless = getattr(transformers, loader).from_pretrained(tmp_path / "base")
    for call in (*uses_of(headless), lambda: specheads.load_head(headless, tmp_path / "head")):
        with pytest.raises(UnsupportedModel, match=r"has no language-model head; load it with AutoModelForCausalLM$"):
            call()
    with pytest.raises(UnsupportedModel, match="load it with AutoModelForSeq2SeqLM"):
        DraftModel(transformers.T5Model(transformers.T5Config(vocab_size=V, d_model=8, d_ff=8, num_layers=1)))


def test_prompt_learning_adapters_are_refused_everywhere():
    """Their virtual tokens are outside the base, which would decode as if they were not there."""
    for kind in ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"]:
        import peft

        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        adapted = peft.get_peft_model(tiny_llama(), config)
        for call in uses_of(adapted):
            with pytest.raises(UnsupportedModel, match=f"{kind} puts virtual tokens before each prompt"):
                call()
