"""Models whose activations are scaled by all tokens of a pass: they are decoded, and nothing is claimed for them."""

import types
import warnings

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

import specheads
from specheads import DraftModel, UnsupportedModel, convert, load_head
from specheads.decoding.generation import warnings as generation_warnings
from specheads.decoding.generation.warnings import scaled_by_pass
from tests.reference.slow_heads import KINDS
from tests.support.tiny_models import near, tiny_llama

IDS = torch.tensor([[1, 5, 6, 7, 5, 6, 7, 5, 6]])
GREEDY = {"max_new_tokens": 12, "do_sample": False}
EMBEDDING = {nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig}


def in_int8(model, embedding=False, lm_head=True):
    """As people convert models for CPUs: the linear layers' `weight` is then a method."""
    linear = {
        name for name, part in model.named_modules() if isinstance(part, nn.Linear) and (lm_head or "lm" not in name)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(model, linear, dtype=torch.qint8)
        return torch.ao.quantization.quantize_dynamic(model, EMBEDDING) if embedding else model


@pytest.fixture(scope="module")
def base():
    return tiny_llama(num_hidden_layers=3)


def test_an_int8_model_is_decoded_and_drafts(base):
    for embedding in [False, True]:
        quantised = in_int8(base, embedding)
        own = quantised.generate(IDS, **GREEDY)
        plain = specheads.generate(quantised, IDS, draft=False, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(plain.sequences, own) and plain.lossless
        for draft in ("lookup", DraftModel(near(base)), DraftModel(quantised)):
            out = specheads.generate(
                quantised, IDS, draft=draft, compile="eager", return_dict_in_generate=True, **GREEDY
            )
            assert out.sequences.shape == own.shape and not out.lossless and not out.statistics()["lossless"]
        drafted = specheads.generate(base, IDS, draft=DraftModel(quantised), return_dict_in_generate=True, **GREEDY)
        assert torch.equal(drafted.sequences, base.generate(IDS, **GREEDY)) and drafted.lossless
        many = specheads.generate_many(quantised, [[3, 4, 5], [6, 7]], draft="lookup", **GREEDY)
        assert [one.lossless for one in many] == [False, False]
        with pytest.raises(ValueError, match="embeddings for 0 to 96"):
            specheads.generate(quantised, IDS + 97, **GREEDY)


def test_rows_of_a_batch_share_a_scale_even_without_drafts(base):
    ids = torch.cat([IDS, IDS.flip(1)])
    for model, lossless in ((in_int8(base), False), (base, True)):
        out = specheads.generate(
            model, ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **GREEDY
        )
        assert out.lossless is lossless


def test_what_the_flag_denies_does_happen(base):
    """Some greedy text with drafts is another one, as it is with transformers' own prompt lookup."""
    quantised, differ = in_int8(base), 0
    for seed in range(12):
        ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
        given = {"max_new_tokens": 40, "do_sample": False}
        differ += not torch.equal(
            specheads.generate(quantised, ids, draft="lookup", **given), quantised.generate(ids, **given)
        )
    assert differ


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_from_layers_in_int8_but_need_the_values_of_the_output_matrix(base, kind, tmp_path):
    with pytest.raises(UnsupportedModel, match=r"output matrix is quantised .*dynamic.*Linear"):
        convert(in_int8(base), kind)
    quantised = in_int8(base, lm_head=False)
    model = convert(quantised, kind)
    out = model.generate(IDS, draft=True, return_dict_in_generate=True, **GREEDY)
    assert out.sequences.shape == (1, 21) and not out.lossless
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path)
    assert torch.equal(load_head(quantised, tmp_path).generate(IDS, draft=True, **GREEDY), out.sequences)


def test_one_warning_says_why(base, monkeypatch):
    said = []
    monkeypatch.setattr(generation_warnings.logger, "warning_once", said.append)
    specheads.generate(in_int8(base), IDS, draft="lookup", **GREEDY)
    specheads.generate(in_int8(base), IDS, draft=False, **GREEDY)
    specheads.generate(base, IDS, draft="lookup", **GREEDY)
    assert len(said) == 1 and "torch.ao's dynamic Linear scales activations by all tokens of a pass" in said[0]


# --- Recognised without the packages ---


def model_with(weight=None, module=None, config=None):
    """A model whose config or whose one module looks like that of a package that need not be installed."""
    part = nn.Linear(2, 2) if module is None else module
    if weight is not None:
        del part._parameters["weight"]
        part.weight = weight
    model = nn.Module()
    model.part, model.config = part, types.SimpleNamespace(quantization_config=config)
    return model


def foreign(name, **state):
    return type(name, (nn.Module,), {"__module__": "bitsandbytes.nn", "state": types.SimpleNamespace(**state)})()


def torchao_weight(granularity):
    kwargs = types.SimpleNamespace(granularity=granularity)
    return type("Float8Tensor", (), {"__module__": "torchao.quantization", "act_quant_kwargs": kwargs})()


def group(strategy, dynamic=True):
    inputs = {"dynamic": dynamic, "num_bits": 8, "strategy": strategy}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": inputs}}}


def test_scales_over_a_pass_are_recognised_and_those_of_each_token_are_not():
    for model, found in [
        (model_with(module=foreign("Linear8bitLt", threshold=6.0)), True),
        (model_with(module=foreign("Linear8bitLt", threshold=0.0)), False),
        (model_with(module=foreign("Linear4bit")), False),
        (model_with(torchao_weight("PerTensor()")), True),
        (model_with(torchao_weight("PerRow()")), False),
        (model_with(config={"quant_method": "torchao", "quant_type": "Float8DynamicActivation()"}), True),
        (model_with(config={"quant_method": "torchao", "quant_type": "Float8DynamicActivation(PerRow())"}), False),
        (model_with(config={"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig()"}), False),
        (model_with(config=group("tensor")), True),
        (model_with(config=group("token")), False),
        (model_with(config=group("tensor", dynamic=False)), False),
        (model_with(config={"quant_method": "quark", "g": [{"is_dynamic": True, "qscheme": "per_tensor"}]}), True),
        (model_with(config=FineGrainedFP8Config()), False),
        (model_with(config=BitsAndBytesConfig(load_in_4bit=True)), False),
        (model_with(), False),
    ]:  # fmt: skip
        assert (scaled_by_pass(model) is not None) is found
