"""Claims about specheads/convert.py: what convert() takes and refuses, and that a SpecModel is what users of
Hugging Face models expect."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils import logging as hf_logging

import specheads
from specheads import Eagle3Config, EagleConfig, MedusaConfig, SpecModel, UnsupportedModel, convert

HEADS = ("medusa", "eagle", "eagle3")
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base_dir(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    base.save_pretrained(folder)
    return folder


# --- naming a head ---


@pytest.mark.parametrize(
    ("head", "config"),
    [
        ("medusa", MedusaConfig()),
        ("eagle", EagleConfig()),
        ("eagle3", Eagle3Config()),
        (MedusaConfig(num_heads=2), MedusaConfig(num_heads=2)),
        ([("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1})], MedusaConfig(num_heads=2, num_layers=1)),
        ([["medusa", {"num_heads": 2}]], MedusaConfig(num_heads=2)),
        ([("eagle", {"eagle_num_layers": 1})], EagleConfig(num_layers=1)),
        ([("eagle", {"eagle_num_layers": 2})], EagleConfig(num_layers=2)),
    ],
)
def test_every_way_of_naming_a_head_gives_that_head(base, head, config):
    model = convert(base, head)
    assert model.head.config == config.filled(base.config)
    assert model.config.head_config() == model.head.config


def test_options_beside_a_name_and_in_a_list_add_up(base):
    assert convert(base, [("medusa", {"num_heads": 2})], num_layers=2).head.config.num_layers == 2
    assert convert(base, "medusa", medusa_num_heads=3).head.config.num_heads == 3


def test_sizes_left_out_come_from_the_base():
    wide = tiny_llama(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, vocab_size=61)
    config = convert(wide, "eagle3").head.config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (48, 80, 61)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 8)
    assert config.draft_vocab_size == 61
    assert config.rope_theta == wide.config.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == wide.config.rms_norm_eps
    assert convert(wide, "eagle").head.config.taps == (8,)
    assert convert(wide, "medusa").head.config.tap == 8


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("medusa", {"num_head": 3}, "unknown medusa head option 'num_head'; did you mean 'num_heads'?"),
        ("eagle", {"eagle_num_layer": 1}, "did you mean 'eagle_num_layers'?"),
        ("eagle3", {"zzz": 1}, "unknown eagle3 head option 'zzz'; known: .*taps"),
        ("medusa", {"num_heads": 2, "medusa_num_heads": 2}, "'num_heads' is given twice"),
        ("medusa", {"num_heads": 0}, "num_heads=0 must be at least 1"),
        ("medussa", {}, "unknown head 'medussa'; known: medusa, eagle, eagle3"),
        (MedusaConfig(), {"num_heads": 2}, r"options \['num_heads'\] next to a head config"),
        ([("medusa", {}), ("eagle", {})], {}, "one entry"),
        (["medusa"], {}, r"\[\(name, options\)\]"),
        ("medusa", {"tap": 9}, "tap=9 is no layer of a base with 8"),
        ("medusa", {"tap": -1}, "tap=-1 is no layer"),
        ("eagle3", {"taps": [1, 2, 9]}, "tapped layer 9 does not exist: the base has 8 layers"),
        ("eagle", {"taps": [-1]}, "tapped layer -1 does not exist"),
        ("eagle", {"taps": [1, 2]}, "one layer"),
        ("eagle3", {"draft_vocab_size": 98}, "draft_vocab_size=98 exceeds the base's vocabulary of 97"),
        ("medusa", {"dtype": "int8"}, "dtype='int8' is not a floating point type"),
        ("medusa", {"dtype": "bf17"}, "dtype='bf17' is not a floating point type"),
    ],
)
def test_a_wrong_head_is_refused_with_what_would_be_right(base, head, options, message):
    with pytest.raises(ValueError, match=message):
        convert(base, head, **options)


# --- the base ---


def test_converting_twice_is_refused(base):
    with pytest.raises(ValueError, match=r"already has a head; convert\(model.base"):
        convert(convert(base, "medusa"), "eagle")


@pytest.mark.parametrize("wrong", [None, nn.Linear(2, 2), 7])
def test_a_base_that_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
        convert(wrong, "medusa")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_base_can_be_given_by_name(base, base_dir, kind):
    model = convert(kind(base_dir), "eagle")
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert model.config.base_model_name_or_path == str(base_dir)


def test_the_base_is_frozen_and_only_the_head_is_trained():
    base = tiny_llama(attention_dropout=0.5)
    base.train()
    model = convert(base, "eagle")
    assert not any(p.requires_grad for p in base.parameters())
    assert all(p.requires_grad for p in model.head.parameters())
    assert not base.training
    model.train()
    assert model.training and model.head.training
    assert not any(module.training for module in base.modules()), "the base's dropout must stay off"
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is None for p in base.parameters())
    assert all(p.grad is not None for p in model.head.parameters())
    assert model.num_parameters(only_trainable=True) == sum(p.numel() for p in model.head.parameters())
    assert model.num_parameters() == base.num_parameters() + model.num_parameters(only_trainable=True)


def test_converting_does_not_change_the_base():
    base = tiny_llama()
    before = {name: t.clone() for name, t in base.state_dict().items()}
    for head in HEADS:
        convert(base, head)
    assert all(torch.equal(t, before[name]) for name, t in base.state_dict().items())


def test_two_heads_share_one_base(base):
    first, second = convert(base, "medusa"), convert(base, "eagle")
    assert first.base is second.base is base
    plain = base.generate(IDS, max_new_tokens=6, do_sample=False)
    for model in (first, second, first):
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), plain)
    assert {name.split(".")[0] for name in first.head_state_dict()} == {"head"}
    assert first.head_state_dict().keys() != second.head_state_dict().keys()


@pytest.mark.parametrize("head", HEADS)
def test_a_base_on_meta_gets_a_head_on_meta(head):
    with torch.device("meta"):
        base = tiny_llama()
    model = convert(base, head)
    assert model.device.type == "meta"
    assert {t.device.type for t in model.head.state_dict().values()} == {"meta"}
    assert model.config.base_fingerprint["weights"] is None


def with_adapter():
    """A peft model whose adapter changes the law (a fresh LoRA has B = 0 and does not)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return adapted.eval()


@pytest.mark.parametrize("head", HEADS)
def test_a_peft_base_keeps_its_adapter(base, head):
    adapted = with_adapter()
    plain = adapted.generate(input_ids=IDS, max_new_tokens=8, do_sample=False)
    assert not torch.equal(plain, base.generate(IDS, max_new_tokens=8, do_sample=False)), "the adapter does nothing"
    model = convert(adapted, head)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), plain)
    assert model(IDS, labels=IDS).loss.isfinite()
    assert not any(p.requires_grad for p in adapted.parameters())


def test_a_peft_base_of_virtual_tokens_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    prompted = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModel, match="PromptTuningConfig puts virtual tokens before each prompt"):
        convert(prompted, "medusa")


class Int8Linear(nn.Module):
    """A linear layer as quantisers leave it: integer weights that no gradient can reach, and scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("head", HEADS)
def test_a_quantised_base_is_served(head):
    base = tiny_llama()
    for layer in base.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(part, name, Int8Linear(module))
    model = convert(base, head)
    assert {p.dtype for p in model.head.parameters()} == {torch.float32}
    assert max(p.abs().max() for p in model.head.parameters()) < 20, "integer codes were taken for weights"
    plain = base.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), plain)
    assert model(IDS, labels=IDS).loss.isfinite()


# --- dtype and device ---


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "bfloat16", "torch.float16", torch.float64])
def test_the_head_has_the_dtype_asked_for(dtype):
    base = tiny_llama().to(torch.bfloat16)
    model = convert(base, "eagle3", dtype=dtype)
    wanted = {None: torch.float32, "bfloat16": torch.bfloat16, "torch.float16": torch.float16}.get(dtype, dtype)
    assert {p.dtype for p in model.head.parameters()} == {wanted}
    assert (model.head.d2t.dtype, model.head.t2d.dtype) == (torch.int64, torch.bool)
    assert model.dtype == base.dtype == torch.bfloat16
    assert model.generate(IDS, max_new_tokens=4).shape == (2, 28)
    assert model(IDS, labels=IDS).loss.isfinite()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.to("cpu").half()])
def test_casting_a_model_casts_base_and_head(cast):
    model = convert(tiny_llama(), "eagle3")
    model.generate(IDS, max_new_tokens=3)  # what decoding has cached must follow the cast
    model = cast(model)
    assert model.dtype == model.head.dtype != torch.float32
    assert model.device == model.base.device == torch.device("cpu")
    assert model.generate(IDS, max_new_tokens=3).shape == (2, 27)


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
    assert by_mask[0] is by_mask.loss, "a Trainer takes the loss by its place"


def test_labels_and_loss_mask_together_are_refused(base):
    with pytest.raises(ValueError, match="labels or loss_mask, not both"):
        convert(base, "medusa")(IDS, labels=IDS, loss_mask=IDS > 0)


def test_packed_documents_without_labels_are_refused(base):
    with pytest.raises(ValueError, match="document_ids"):
        convert(base, "medusa")(IDS, document_ids=torch.ones_like(IDS))


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


def test_eagle_starts_by_guessing_the_feature_again_with_the_token_at_a_third_of_its_scale(base):
    from specheads.heads import TapBatch

    base = deep_copied(base)
    with torch.no_grad():
        base.model.norm.weight.fill_(5.0)  # features on another scale than the residual stream
        features = base(IDS, output_hidden_states=True).hidden_states[-1]
    head = convert(base, "eagle").head
    ones = torch.ones_like(IDS)
    embed = base.get_input_embeddings()
    batch = TapBatch(IDS, features, None, ones.bool(), ones, ones.cumsum(1) - 1, embed, base.lm_head)
    (guess,) = head.unroll(batch, 1)
    added = guess - features
    following = embed(torch.cat([IDS[:, 1:], IDS[:, :1]], 1))
    torch.testing.assert_close(added / added.norm(), following / following.norm())
    assert float(added.norm()) == pytest.approx(float(features.norm()) / 3, rel=0.2)


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


@pytest.fixture
def hf_log(caplog):
    """What transformers logs, which it keeps from the root logger."""
    hf_logging.enable_propagation()
    yield caplog
    hf_logging.disable_propagation()


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
