"""Claims about SpecModel: forward is a loss or the base's own, and it is what users of Hugging Face models expect."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

import specheads
from specheads import SpecModel, convert
from specheads.training.trainer.trainer import longest_text
from tests.support.tiny_models import tiny_llama, tiny_llava

HEADS = ("medusa", "hydra", "eagle", "eagle3", "mtp", "parallel")
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


# --- forward ---


@pytest.mark.parametrize("head", HEADS)
def test_forward_without_labels_is_the_bases_own(base, head):
    model = convert(base, head)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    own = base(IDS, attention_mask=mask, output_hidden_states=True)
    out = model(IDS, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(out.logits, own.logits)
    assert torch.equal(out.hidden_states[3], own.hidden_states[3])
    assert torch.equal(model(IDS, return_dict=False)[0], base(IDS).logits)


@pytest.mark.parametrize("head", HEADS)
def test_labels_and_loss_mask_give_the_same_loss(base, head):
    model = convert(base, head).eval()  # no feature noise
    supervised = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    by_labels = model(IDS, labels=torch.where(supervised, IDS, -100))
    by_mask = model(IDS, loss_mask=supervised)
    assert torch.equal(by_labels.loss, by_mask.loss)
    assert torch.equal(by_mask.loss, model(IDS, loss_mask=supervised.long()).loss)
    assert not torch.equal(by_mask.loss, model(IDS, labels=IDS).loss)
    assert by_mask[0] is by_mask.loss, "a Trainer takes the loss by its index"


def test_labels_and_loss_mask_together_are_refused(base):
    with pytest.raises(ValueError, match="labels or loss_mask, not both"):
        convert(base, "medusa")(IDS, labels=IDS, loss_mask=IDS > 0)


@pytest.mark.parametrize("name", ["pixel_values", "lables"])
def test_an_argument_from_which_nothing_would_be_learnt_is_refused_by_name(name, base):
    model = convert(base, "medusa")
    with pytest.raises(TypeError, match=f"{name} would be left out"):
        model(IDS, labels=IDS, **{name: torch.ones(1)})


def test_packed_documents_without_labels_are_refused(base):
    with pytest.raises(ValueError, match="document_ids"):
        convert(base, "medusa")(IDS, document_ids=torch.ones_like(IDS))


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_documents_begin_where_positions_do_not_rise(padding, base):
    """As DataCollatorWithFlattening gives them, which transformers' models read so; padding begins none."""
    model, rows = convert(base, "eagle3", steps=2).eval(), [IDS[0, :9].tolist(), [5], IDS[1, :12].tolist()]
    flat = DataCollatorWithFlattening()([{"input_ids": row, "labels": row} for row in rows])
    assert set(flat) == {"input_ids", "labels", "position_ids"}
    known = {**flat, "document_ids": torch.tensor([[1] * 9 + [2] + [3] * 12])}
    if padding:
        sides = (3, 0) if padding == "left" else (0, 3)
        fills = {"input_ids": 0, "labels": -100, "position_ids": 1, "document_ids": 0, "attention_mask": 0}
        known["attention_mask"] = torch.ones_like(known["input_ids"])
        known = {name: torch.nn.functional.pad(t, sides, value=fills[name]) for name, t in known.items()}
    told = {name: t for name, t in known.items() if name != "document_ids"}
    assert torch.equal(model(**told).loss, model(**known).loss)
    assert int(longest_text(told)) == int(longest_text(known)) == 12
    one = {**told, "position_ids": torch.arange(told["input_ids"].shape[1]).unsqueeze(0)}
    assert not torch.equal(model(**told).loss, model(**one).loss)


def tiny_gpt2():
    """Positions learnt, not rotary: a shift of all of them shows."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_padding_does_not_change_the_loss(make, head):
    model = convert(make(), head).eval()  # no feature noise
    alone = model(IDS[:1], labels=IDS[:1]).loss
    pad = torch.zeros(1, 5, dtype=torch.long)
    padded, mask = torch.cat([IDS[:1], pad], 1), torch.cat([torch.ones_like(IDS[:1]), pad], 1)
    labels = torch.where(mask.bool(), padded, -100)
    torch.testing.assert_close(model(padded, attention_mask=mask, labels=labels).loss, alone)
    flipped = [t.roll(5, 1) for t in (padded, mask, labels)]
    torch.testing.assert_close(model(flipped[0], attention_mask=flipped[1], labels=flipped[2]).loss, alone)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.sampled(2)
def test_a_plain_trainer_trains_the_head_alone(tmp_path, head):
    base = tiny_llama()
    model = convert(base, head)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, save_steps=2,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed and all(name.startswith("head.") for name in changed)
    restored = specheads.load_head(base, tmp_path / "out" / "checkpoint-2")
    assert all(torch.equal(t, model.head_state_dict()[name]) for name, t in restored.head_state_dict().items())
    assert (tmp_path / "out/checkpoint-2/model.safetensors").stat().st_size < 4 * sum(
        t.numel() for t in model.head_state_dict().values()
    ) + 20_000
    # resuming finds the head's tensors, and does not call the base's missing
    again = convert(tiny_llama(), head)
    arguments.max_steps = 3
    Trainer(again, arguments, train_dataset=rows).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))


# --- what users of Hugging Face models expect ---


def test_the_model_answers_like_its_base(base):
    model = convert(base, "medusa")
    assert model.get_input_embeddings() is base.get_input_embeddings()
    assert model.get_output_embeddings() is base.get_output_embeddings()
    assert model.generation_config is base.generation_config
    assert model.base_model is base and model.get_decoder() is base.model
    assert model.can_generate()
    assert model.config.model_type == "specheads"
    assert "(head): MedusaHead" in repr(model) and "(base): LlamaForCausalLM" in repr(model)
    assert next(model.eval().parameters()).device == model.device


def test_setting_the_generation_config_sets_the_bases():
    model = convert(tiny_llama(), "medusa")
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.max_new_tokens = 3
    assert model.base.generation_config.max_new_tokens == 3
    assert model.generate(IDS).shape == (2, 27)


def test_setting_the_attention_sets_the_bases():
    model = convert(tiny_llama(), "eagle")
    model.set_attn_implementation("eager")
    assert model.base.config._attn_implementation == "eager"


def test_the_vocabulary_cannot_be_resized_under_a_head():
    model = convert(tiny_llama(), "medusa")
    with pytest.raises(ValueError, match=r"resize the base before convert\(\)"):
        model.resize_token_embeddings(100)
    assert len(model.get_input_embeddings().weight) == 97


@pytest.mark.parametrize("tied", [True, False])
def test_launchers_can_tie_the_weights_again(tied):
    base = tiny_llama(tie_word_embeddings=tied)
    model = convert(base, "eagle3")
    head = {name: t.clone() for name, t in model.head_state_dict().items()}
    model.tie_weights()
    assert (base.lm_head.weight is base.model.embed_tokens.weight) == tied
    assert all(torch.equal(t, head[name]) for name, t in model.head_state_dict().items())
    assert bool(model.all_tied_weights_keys) == tied
    assert model._no_split_modules == base._no_split_modules


def deep_copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("copied", [deep_copied, pickled, torch_saved])
@pytest.mark.parametrize("head", HEADS)
def test_a_copy_is_a_model_of_its_own(head, copied):
    model = convert(tiny_llama(), head)
    other = copied(model)
    assert isinstance(other, SpecModel) and other.head.config == model.head.config
    assert torch.equal(other.generate(IDS, max_new_tokens=5), model.generate(IDS, max_new_tokens=5))
    with torch.no_grad():
        next(other.head.parameters()).add_(1)
    assert not torch.equal(next(other.head.parameters()), next(model.head.parameters()))


def test_a_state_dict_goes_out_and_in(base):
    model, other = convert(base, "eagle"), convert(base, "eagle", init=False)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    assert {name.split(".")[0] for name in state} == {"base", "head"}
    other.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())
    assert other.load_state_dict(model.head_state_dict(), strict=False).unexpected_keys == []


def test_accelerate_prepares_and_saves_it(base, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(convert(base, "eagle3"))
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    restored = specheads.load_head(base, tmp_path)
    assert all(torch.equal(t, model.head_state_dict()[name]) for name, t in restored.head_state_dict().items())


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


@pytest.mark.parametrize("prompts", ["w3 w5 w7", ["w3 w5 w7", "w9"]])
def test_a_text_generation_pipeline_drafts_and_gives_the_bases_text(base, prompts, hf_log, monkeypatch):
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    model = convert(base, "eagle3")
    drafted, propose = [], model.head.propose
    monkeypatch.setattr(model.head, "propose", lambda *args: drafted.append(1) or propose(*args))
    text = pipeline("text-generation", model=model, tokenizer=word_tokenizer())(prompts, **options)
    assert drafted and "not supported" not in hf_log.text
    assert text == pipeline("text-generation", model=base, tokenizer=word_tokenizer())(prompts, **options)


def test_a_pipeline_takes_a_checkpoint_directory(base_dir, tmp_path):
    convert(base_dir, "medusa").save_pretrained(tmp_path)
    drafting = pipeline("text-generation", model=str(tmp_path), tokenizer=word_tokenizer())
    assert isinstance(drafting.model, SpecModel)
    assert drafting("w3 w5", max_new_tokens=4)


def test_the_auto_class_makes_no_model_from_a_config_alone(base):
    with pytest.raises(ValueError, match=r"convert\(\)"):
        AutoModelForCausalLM.from_config(convert(base, "medusa").config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
@pytest.mark.parametrize("head", HEADS)
def test_what_generating_leaves_behind_can_be_trained_with_copied_and_written_to(head, rope_type):
    # Decoding runs in inference mode, whose tensors can be neither saved for a backward pass nor changed outside it.
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    model = convert(tiny_llama(max_position_embeddings=32, rope_parameters=rope), head)
    out = model.generate(IDS, max_new_tokens=24, return_dict_in_generate=True, output_scores=True)
    out.sequences[0, 0] = 5
    out.scores[0][0, 0] = 1.0
    model.base.requires_grad_(True)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.head.parameters() if p.requires_grad)
    model.base(IDS, labels=IDS).loss.backward()
    copied = copy.deepcopy(model)
    for buffer in (*model.base.buffers(), *model.head.buffers()):
        buffer.copy_(buffer.clone())  # as a broadcast among processes does
    assert torch.equal(copied.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))


# --- The config, as evaluation tools read it ---


@pytest.mark.parametrize("make", [tiny_llama, tiny_llava], ids=["llama", "llava"])
def test_the_config_answers_for_the_bases_sizes_and_saves_none_of_them(make, tmp_path):
    base = make()
    model, text = convert(base, "medusa"), base.config.get_text_config()
    for config in (model.config, copy.deepcopy(model).config, pickle.loads(pickle.dumps(model.config))):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            assert getattr(config, name) == getattr(text, name)
        assert config.get_text_config().vocab_size == text.vocab_size
        assert (
            config.model_type == "specheads" and not hasattr(config, "n_ctx") and not hasattr(config, "sliding_window")
        )
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert "max_position_embeddings" not in saved.replace(str(model.config.head), "") and '_base"' not in saved
    assert "num_hidden_layers" not in model.config.to_dict() and "_base" not in model.config.to_dict()
    loaded = SpecModel.from_pretrained(tmp_path, base=base)
    assert loaded.config.max_position_embeddings == text.max_position_embeddings


def test_a_gpt_2s_context_length_is_found_under_its_own_name():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=97)
    found = convert(GPT2LMHeadModel(config), "medusa").config
    assert found.n_positions == found.max_position_embeddings == 64 and not hasattr(found, "n_ctx")
