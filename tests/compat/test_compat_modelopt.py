"""specheads.compat.modelopt: the object a user holds becomes the model with the head."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import specheads
from specheads import SpecModel
from specheads.compat import modelopt as mto
from specheads.compat import modelopt as mtsp
from tests.models.test_quantized import CONFIGS
from tests.support.modelopt_scripts import (
    EAGLE,
    IDS,
    MEDUSA,
    PROMPT,
    SIZES,
    greedy,
    small,
    trainer_of,
)
from tests.support.tiny_models import tiny_llama, with_adapter


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


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_dispatched_base_keeps_its_hooks(device, tmp_path):
    small().save_pretrained(tmp_path / "base")
    devices = {"model.embed_tokens": "cpu", "model.layers": device, "model.norm": "cpu", "lm_head": "cpu"}
    devices |= {"model.rotary_emb": "cpu"}
    if device == "disk":
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
    if device == "disk":
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
