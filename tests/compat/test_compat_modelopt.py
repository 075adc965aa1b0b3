"""specheads.compat.modelopt: the object a user holds becomes the model with the head, and ModelOpt's scripts run."""

import copy
import gc
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import specheads
from specheads import SpecConfig, SpecModel, SpecTrainer, SpecTrainingArguments, chain
from specheads.compat import modelopt as mto
from specheads.compat import modelopt as mtsp
from specheads.compat.modelopt.config import read_mode
from specheads.compat.modelopt.plugins import supervised
from tests.models.test_quantized import CONFIGS
from tests.support.scripted_model import Scripted
from tests.support.tiny_models import tiny_llama, with_adapter
from tests.support.two_vocabularies import TARGET

IDS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(0))
PROMPT = IDS[:1, :6]
MEDUSA = [("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1})]
SIZES = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EAGLE = [("eagle", {"eagle_architecture_config": SIZES})]


@pytest.fixture(autouse=True)
def registered():
    """What enable_huggingface_checkpointing() changes is of the whole process."""
    yield
    AutoModelForCausalLM.register(SpecConfig, SpecModel, exist_ok=True)


def small(**options):
    return tiny_llama(num_hidden_layers=3, **options)


def greedy(model, **options):
    return model.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)


# --- In place ---


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (MEDUSA, "medusa"), (["medusa"], "medusa"), ("medusa", "medusa"), (EAGLE, "eagle3"),
        ({"algorithm": "medusa", "config": {"medusa_num_heads": 2}}, "medusa"),
        ([("eagle1", {"eagle_num_layers": 1, "eagle_architecture_config": SIZES})], "eagle"),
    ],
    ids=str,
)  # fmt: skip
def test_the_held_object_becomes_the_model_with_the_head(mode, kind):
    held = small()
    plain, weights, kind_of_base = greedy(held), dict(held.named_parameters()), type(held)
    assert mtsp.convert(held, mode) is held
    assert isinstance(held, SpecModel) and type(held.base) is kind_of_base and held.head.config.kind == kind
    native = specheads.convert(small(), held.head.config)
    assert list(held.state_dict()) == list(native.state_dict())
    named = dict(held.named_parameters())
    assert named.keys() == dict(native.named_parameters()).keys()
    assert all(named[f"base.{name}"] is weight for name, weight in weights.items())
    assert {name for name, p in named.items() if p.requires_grad} == {
        name for name, p in native.named_parameters() if p.requires_grad
    }
    assert held.config.to_dict() == native.config.to_dict() and repr(held).startswith("HF")
    assert torch.equal(greedy(held), plain)
    held.to(torch.float64)
    assert held.dtype == torch.float64 == held.head.dtype and held.device == torch.device("cpu")
    assert torch.equal(greedy(held), plain)


def test_the_parts_of_the_base_are_where_they_were():
    held = small()
    model, lm_head = held.model, held.lm_head
    mtsp.convert(held, MEDUSA)
    assert held.model is model and held.lm_head is lm_head and held.medusa_heads is held.head
    with pytest.raises(AttributeError, match="no attribute 'is_quantized'"):
        held.is_quantized  # noqa: B018


def test_a_second_head_is_refused_by_the_name_of_the_first():
    held = small()
    mtsp.convert(held, MEDUSA)
    for again in (lambda: mtsp.convert(held, EAGLE), lambda: mto.restore(held, "nowhere")):
        with pytest.raises(ValueError, match=r"already has a head \(medusa\); load the base again"):
            again()
    assert held.head.config.kind == "medusa"


@pytest.mark.parametrize("mode", [[("medusa", {"heads": 2})], [("medusa", {"tap": 9})], "hydra", []], ids=str)
def test_where_it_cannot_be_converted_the_held_object_is_as_it_was(mode):
    held = small()
    before, plain = dict(vars(held)), greedy(held)
    with pytest.raises(ValueError):
        mtsp.convert(held, mode)
    assert type(held).__name__ == "LlamaForCausalLM" and vars(held) == before
    assert torch.equal(greedy(held), plain) and all(p.requires_grad for p in held.parameters())
    held(IDS, labels=IDS).loss.backward()


def test_a_compiled_base_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    held = small()
    held.compile()
    with pytest.raises(ValueError, match=r"compiled \(model.compile\(\)\); convert it before"):
        mtsp.convert(held, MEDUSA)


def test_copies_and_pickles_stand_alone():
    held = small()
    mtsp.convert(held, MEDUSA)
    for other in (pickle.loads(pickle.dumps(held)), copy.deepcopy(held)):
        assert type(other) is type(held) and other.base is not held.base
        assert not {id(p) for p in other.parameters()} & {id(p) for p in held.parameters()}
        with torch.no_grad():
            other.base.lm_head.weight.zero_()
        assert greedy(other)[0, 6:].eq(0).all() and not greedy(held)[0, 6:].eq(0).all()


def test_hooks_and_patches_of_the_held_object_are_those_of_its_base():
    held = small()
    seen, own = [], held.forward

    def patched(*args, **kwargs):  # a closure over what was held
        seen.append(own.__self__)
        return own(*args, **kwargs)

    held.forward = patched
    handles = [
        held.register_forward_hook(lambda module, args, output: seen.append(module)),
        held.register_load_state_dict_pre_hook(lambda module, *args: seen.append(module)),
    ]
    held(IDS, output_hidden_states=True)  # transformers leaves hooks too
    held.gradient_checkpointing_enable()
    specheads.patch(held)
    plain = greedy(held)
    mtsp.convert(held, MEDUSA)
    assert not {"forward", "generate"} & vars(held).keys() and not held._forward_hooks
    seen.clear()
    held.base(IDS)
    held.base.load_state_dict(held.base.state_dict())
    assert seen == [held.base] * 3
    for handle in handles:
        handle.remove()
    seen.clear()
    held.base(IDS)
    assert seen == [held.base] and torch.equal(greedy(held), plain)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_dispatched_base_keeps_its_hooks(place, tmp_path):
    small().save_pretrained(tmp_path / "base")
    devices = {"model.embed_tokens": "cpu", "model.layers": place, "model.norm": "cpu", "lm_head": "cpu"}
    devices |= {"model.rotary_emb": "cpu"}
    if place == "disk":
        held = AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", device_map=devices, offload_folder=str(tmp_path / "offload")
        )
    else:
        held = dispatch_model(small(), devices, force_hooks=True)
    assert hasattr(held, "_hf_hook") and "forward" in vars(held)
    plain = greedy(held)
    mtsp.convert(held, MEDUSA)
    assert not {"_hf_hook", "_old_forward", "forward", "to"} & vars(held).keys()
    assert held.base._old_forward.__self__ is held.base and held.base.forward.args == (held.base,)
    assert held.hf_device_map["base.lm_head"] == "cpu" and torch.equal(greedy(held), plain)
    trainer_of(held, tmp_path / "out", max_steps=1).train()
    if place == "disk":
        with pytest.raises(RuntimeError, match="move a model"):
            held.base.to("cpu")


def test_tied_weights_stay_tied():
    held = small(tie_word_embeddings=True)
    plain = greedy(held)
    mtsp.convert(held, EAGLE)
    assert held.base.lm_head.weight is held.base.model.embed_tokens.weight and torch.equal(greedy(held), plain)
    assert held.all_tied_weights_keys == {"base.lm_head.weight": "base.model.embed_tokens.weight"}


@pytest.mark.parametrize("wrapped", [True, False], ids=["PeftModel", "injected"])
def test_adapters_stay_in_the_base(wrapped):
    held = with_adapter() if wrapped else with_adapter().get_base_model()
    plain = held.generate(input_ids=PROMPT, max_new_tokens=12, do_sample=False)
    assert not torch.equal(plain, greedy(tiny_llama()))
    mtsp.convert(held, MEDUSA)
    assert isinstance(held, SpecModel) and type(held.base).__name__ == "LlamaForCausalLM"
    assert torch.equal(greedy(held), plain)
    assert all(name.startswith("head.") for name, p in held.named_parameters() if p.requires_grad)


class Int8Linear(nn.Module):
    """A linear layer as quantisers leave it: no floating point weight."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        scale = linear.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


def test_a_quantised_base_trains_under_a_plain_trainer(tmp_path):
    """transformers.Trainer refuses a quantised model that nothing is put beside."""
    held = small()
    for layer in held.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    held.is_quantized, held.quantization_method = True, "int8"
    held.hf_quantizer = SimpleNamespace(is_trainable=True, is_compileable=False)
    with pytest.raises(ValueError, match="purely quantized"):
        trainer_of(held, tmp_path)
    plain = greedy(held)
    mtsp.convert(held, EAGLE)
    trainer_of(held, tmp_path, max_steps=1).train()
    assert torch.equal(greedy(held), plain) and held.base.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_in_bitsandbytes_trains_and_decodes(bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tiny_llama(num_hidden_layers=3, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(**CONFIGS[bits])
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, dtype=torch.float32)
    plain = greedy(held)
    mtsp.convert(held, MEDUSA)
    trainer_of(held, tmp_path / "out", max_steps=1).train()
    if bits == 4:  # whose kernel on a CPU is another once it is frozen
        assert torch.equal(greedy(held), greedy(held, draft=False))
    else:  # the eighth bit rounds activations by what else is in a pass
        assert torch.equal(greedy(held.base), plain)
    held.save_pretrained(tmp_path / "head")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "head").config.base_quantization[f"load_in_{bits}bit"]


# --- transformers' Trainer ---


def modelopts(ids, answer_from=4):
    """A row as ModelOpt's examples make it: labels and loss_mask about the next token, 0 where a collator pads."""
    labels, loss_mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    labels[answer_from - 1 : -1], loss_mask[answer_from - 1 : -1] = ids[answer_from:], 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "loss_mask": loss_mask}


def padded(rows):
    """As their DataCollatorWithPadding does, labels included."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values):
        return torch.cat([values, torch.zeros(longest - len(values), dtype=values.dtype)])

    return {name: torch.stack([pad(row[name]) for row in rows]) for name in rows[0]}


ROWS = [modelopts(row[:length]) for row, length in zip(IDS.repeat(2, 1), (14, 9, 12, 14), strict=True)]


def trainer_of(model, folder, **options):
    arguments = TrainingArguments(
        str(folder), **{"max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **options},
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:3], data_collator=padded)


def same_heads(one, other):
    own = other.head_state_dict()
    return all(torch.equal(tensor, own[name]) for name, tensor in one.head_state_dict().items())


@pytest.mark.parametrize("mode", [MEDUSA, EAGLE], ids=["medusa", "eagle"])
def test_trainer_trains_resumes_evaluates_saves_and_restores_the_held_object(mode, tmp_path):
    small().save_pretrained(tmp_path / "base")
    mto.enable_huggingface_checkpointing()

    def converted():
        torch.manual_seed(0)
        held = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        mtsp.convert(held, mode)
        return held

    model = converted()
    fresh = copy.deepcopy(model)
    trainer = trainer_of(model, tmp_path / "run", save_strategy="steps", save_steps=2)
    trainer._move_model_to_device(model, trainer.args.device)  # as their main.py does
    trainer.can_return_loss = True
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0] and not same_heads(model, fresh)
    for name, weight in fresh.base.state_dict().items():
        assert torch.equal(model.base.state_dict()[name], weight), name

    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    for resumed in (converted(), AutoModelForCausalLM.from_pretrained(checkpoint)):
        again = trainer_of(resumed, tmp_path / "again")
        again.train(resume_from_checkpoint=checkpoint)
        assert same_heads(resumed, model) and type(resumed) is type(model)

    evaluated = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        chosen = [model.eval()(**padded(ROWS[:3])).loss.item()]
    assert evaluated == pytest.approx(sum(chosen), rel=1e-4)
    trainer.save_state()
    trainer.save_model(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mto.save(model, str(tmp_path / "modelopt.pth"))
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert mto.restore(held, tmp_path / "modelopt.pth") is held
    for other in (loaded, held):
        assert same_heads(other, model) and type(other) is type(model)
        assert torch.equal(greedy(other), greedy(model))


def test_labels_count_alike_shifted_and_not():
    held = small()
    mtsp.convert(held, MEDUSA)
    batch = padded(ROWS)
    unshifted = torch.full_like(batch["labels"], -100)
    unshifted[:, 1:] = torch.where(batch["loss_mask"].bool(), batch["labels"], -100)[:, :-1]
    plain = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    wanted = SpecModel.forward(held, **plain, labels=unshifted).loss
    only_labels = batch["labels"].masked_fill(~batch["attention_mask"].bool(), -100)
    for given in (
        batch, {**batch, "num_items_in_batch": (batch["labels"] != -100).sum()}, {**plain, "labels": unshifted},
        {**plain, "labels": only_labels}, {**plain, "attention_mask": plain["attention_mask"].bool(),
        "labels": only_labels},
    ):  # fmt: skip
        torch.testing.assert_close(held(**given).loss, wanted)


def test_labels_of_another_text_are_refused():
    ids = torch.tensor([[5, 6, 7, 8]])
    assert supervised(ids, torch.tensor([[-100, 7, 8, -100]])).tolist() == [[False, False, True, True]]
    assert supervised(ids, torch.tensor([[-100, 6, 7, -100]])).tolist() == [[False, True, True, False]]
    with pytest.raises(ValueError, match="neither the tokens of input_ids"):
        supervised(ids, torch.tensor([[-100, 9, 7, 8]]))


# --- A base whose head was not kept ---


def test_a_trainer_of_the_base_says_that_the_head_was_not_kept(tmp_path):
    base = small()
    specheads.convert(base, "medusa")
    gc.collect()
    expected = r"LlamaForCausalLM was frozen by specheads.convert\(\), whose result was not kept; write model = convert"
    with pytest.raises(ValueError, match=expected):
        trainer_of(base, tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=expected):
        SpecTrainer(base, SpecTrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_the_loss_of_a_frozen_base_is_read_as_ever():
    base = small()
    wanted = base(IDS, labels=IDS).loss.item()
    model = specheads.convert(base, "medusa")
    specheads.convert(base, "eagle3")
    assert len(base._forward_hooks) == 1
    with pytest.raises(ValueError, match="result was not kept"):
        copy.deepcopy(base)(IDS, labels=IDS).loss.backward()
    assert base(IDS, labels=IDS).loss.item() == wanted
    with torch.no_grad():
        assert not base(IDS, labels=IDS).loss.requires_grad
    model(IDS, labels=IDS).loss.backward()
    base.requires_grad_(True)
    base(IDS, labels=IDS).loss.backward()
    assert base.lm_head.weight.grad.abs().sum() > 0


# --- Acceptance ---


def test_acceptance_is_tokens_an_iteration_of_the_first_too():
    """Iterations give 1 of 10 tokens, 2 + 1, 0 + 1, 3 + 1, and the last one."""
    text = torch.arange(3, 16).unsqueeze(0)
    model = Scripted(text, [2, 0, 3, 3])
    validation = mtsp.HFARValidation(model, TARGET)
    written, rate = validation.validate(10, input_ids=text[:, :3], ground_truth=text, steps=3)
    assert torch.equal(written, text) and rate == 10 / 5
    assert model.asked == [3, 6, 7, 11]


def test_online_the_token_in_place_of_a_rejected_one_is_appended_and_not_counted():
    text = torch.arange(3, 16).unsqueeze(0)
    model = Scripted(text, [2, 0, 3, 3])
    ids, rate = mtsp.AcceptanceRateValidation(model, TARGET).validate_online(9, input_ids=text[:, :3], steps=3)
    # iterations give 1 + 2 (+ 1), 1 + 0 (+ 1) and 1 + 2, for whose third draft there is no room
    assert torch.equal(ids, text[:, :12]) and rate == (3 + 1 + 3) / 3


@pytest.mark.parametrize("mode", [MEDUSA, EAGLE], ids=["medusa", "eagle"])
def test_acceptance_is_what_decoding_gives(mode):
    held = small(eos_token_id=None, initializer_range=0.1)  # which repeats itself now and then
    mtsp.convert(held, mode)
    if mode is MEDUSA:  # a head that is right now and then: the base's own output matrix
        for layer in held.head.lm_heads:
            layer.weight.data.copy_(held.base.lm_head.weight)
    rates = []
    for start in range(4):
        prompt = IDS[:, start : start + 5][:1]
        text, rate = mtsp.HFARValidation(held, TARGET).validate(12, input_ids=prompt, steps=2)
        out = held.generate(prompt, max_new_tokens=12, do_sample=False, tree=chain(2), return_dict_in_generate=True)
        assert torch.equal(text, out.sequences) and rate == 12 / len(out.steps)
        rates.append(rate)
    assert mode is EAGLE or max(rates) > 1


def test_acceptance_refuses_what_it_does_not_count():
    validation = mtsp.HFARValidation(Scripted(IDS, []), TARGET)
    for options, message in (
        ({"tree_paths": [[0]], "input_ids": PROMPT}, "chains alone"), ({}, "give a prompt"),
        ({"input_ids": IDS}, "a batch of 2"), ({"input_ids": PROMPT, "ground_truth": PROMPT}, "has none after"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            validation.validate(5, **options)


# --- Configs ---


def options_of(mode):
    base = small().config
    return read_mode(mode, base)


def test_the_default_eagle_is_modelopts():
    for mode in ("eagle", mtsp.EAGLE3_DEFAULT_CFG, [("eagle", {"eagle_architecture_config": {}})]):
        kind, options = options_of(mode)
        assert kind == "eagle3" and options == {
            "num_layers": 1, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "steps": 3,
            "step_decay": 0.9, "draft_vocab_size": 97, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }  # fmt: skip
    assert options_of(mtsp.EAGLE1_DEFAULT_CFG)[0] == options_of("eagle1")[0] == "eagle"
    assert options_of("medusa") == ("medusa", {"num_heads": 2})


def test_options_of_modelopts_recipes_and_examples_arrive():
    whole = {  # what recipe.eagle.model_dump() gives
        "eagle_offline": False, "eagle_hidden_state_distillation": False, "eagle_self_logit_distillation": True,
        "eagle_freeze_base_model": True, "eagle_report_acc": True, "eagle_reuse_base_decoder": False,
        "eagle_loss_decay_factor": 0.7, "eagle_decoder_type": "llama", "eagle_ttt_steps": 2,
        "eagle_mix_hidden_states": False, "eagle_use_torch_compile": True, "eagle_enable_nvtx": False,
        "eagle_export_rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "eagle_base_lora": False,
        "eagle_base_lora_rank": 64, "eagle_base_lora_target_modules": None,
        "eagle_architecture_config": {
            **SIZES, "hidden_size": 32, "vocab_size": 97, "draft_vocab_size": 40, "max_position_embeddings": 512,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "num_hidden_layers": 2, "torch_dtype": "bfloat16",
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}, "rope_theta": 5e5, "initializer_range": 0.02,
        },
    }  # fmt: skip
    held = small()
    mtsp.convert(held, [("eagle", whole)])
    config = held.eagle_config
    assert (config.steps, config.step_decay, config.num_layers, config.taps) == (2, 0.7, 2, (1, 2, 3))
    assert (config.head_dim, config.intermediate_size, config.draft_vocab_size) == (8, 48, 40)
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["rope_theta"] == 5e5
    assert held.eagle_config.draft_vocab_size < held.eagle_config.vocab_size


def test_a_draft_vocabulary_is_loaded_from_a_d2t_file(tmp_path):
    shape = {**SIZES, "draft_vocab_size": 4}
    ids = torch.tensor([90, 3, 50, 7])  # the most frequent first, as their script writes them
    torch.save(ids - torch.arange(4), tmp_path / "d2t.pt")
    held = small()
    mtsp.convert(held, [("eagle", {"eagle_architecture_config": shape})])
    with pytest.raises(FileNotFoundError, match="draft_vocab_size=4 of 97"):
        mtsp.plugins.HFEagleModel.load_draft_vocab_cache(held, None)
    with pytest.raises(ValueError, match="d2t has shape"):
        held.eagle_module.d2t = torch.zeros(5, dtype=torch.long)
    mtsp.plugins.HFEagleModel.load_draft_vocab_cache(held, str(tmp_path / "d2t.pt"))
    assert torch.equal(held.eagle_module.d2t, ids - torch.arange(4)) and held.head.t2d.nonzero().flatten().tolist() == [
        3, 7, 50, 90,
    ]  # fmt: skip
    assert torch.equal(held.head.lm_head.weight, held.base.lm_head.weight[ids])
    held.save_pretrained(tmp_path / "head")
    assert torch.equal(greedy(held), greedy(held, draft=False))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_offline": True}, "eagle_offline=True is not supported, only False; `specheads train`"),
        ({"eagle_base_lora": True}, "lora={...}"),
        ({"eagle_decoder_type": "kimik2"}, "eagle_decoder_type='kimik2' is not supported, only 'llama'"),
        ({"eagle_ttt_step": 3}, "eagle3 head option 'eagle_ttt_step'; "),
        ({"eagle_architecture_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True is not supported"),
        ({"eagle_architecture_config": {"head_dims": 3}}, "did you mean 'eagle_architecture_config.head_dim'"),
        ({"eagle_architecture_config": 3}, "eagle_architecture_config=3; expected options by name"),
        ({"use_aux_hidden_state": False, "draft_vocab_size": 4}, "eagle head option 'draft_vocab_size'"),
    ],
    ids=str,
)
def test_what_a_head_here_cannot_be_is_refused_by_its_name(config, message):
    with pytest.raises(ValueError) as caught:
        mtsp.convert(small(), [("eagle", config)])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["dflash", [("medusa", {}), ("eagle", {})], {"mode": "medusa"}, [("medusa", 3)], None])
def test_modes_that_are_none_are_refused(mode):
    with pytest.raises(ValueError, match="mode"):
        mtsp.convert(small(), mode)


def test_an_eagle3_head_is_exported_as_modelopt_writes_it(tmp_path, capsys):
    held = tiny_llama()
    mtsp.convert(held, EAGLE)
    mto.export_hf_checkpoint(held, export_dir=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file() and "eagle_config" in Path(
        tmp_path / "out" / "config.json"
    ).read_text("utf8")
    mto.print_rank_0("done")
    assert capsys.readouterr().out.endswith("done\n")
    with pytest.raises(ValueError, match="has no head to save"):
        mto.save(small(), tmp_path / "x")
    with pytest.raises(ValueError, match="give its path, not a BufferedWriter"), open(tmp_path / "f", "wb") as file:
        mto.save(held, file)
