"""A base with int8 weights on a CPU is one model whatever runs it, and heads, adapters and features work beside it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import specheads
from specheads import Int8Config, SpecModel, convert
from specheads.decoding.kernels import few_rows
from specheads.decoding.kernels.int8_linear import Int8Linear
from specheads.models.base.int8 import to_int8
from specheads.models.base.loading import load_language_model
from specheads.models.named import Models
from specheads.training.features.frozen_weights import KeptBase, save_base_parts, skeleton
from tests.support.compiled_texts import fresh_dynamo, needs_compiler  # noqa: F401
from tests.support.tiny_models import tiny_llama

IDS = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("int8") / "base"
    options = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
    tiny_llama(tie_word_embeddings=True, **options).to(torch.bfloat16).save_pretrained(where)
    return where


def load(folder, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Int8Config(), dtype=dtype).eval()


def greedy(model, **options):
    return specheads.generate(model, IDS, max_new_tokens=14, eos_token_id=None, do_sample=False, **options)


def dense_copy(model):
    """A plain model with the weights that the int8 layers apply."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Int8Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight = nn.Parameter(layer.weight.double() * layer.scale.double()[:, None])
            model.set_submodule(name, plain)
    return nn.Module.double(model)


def test_the_layers_are_int8_and_near_the_weights_they_were(folder):
    plain, model = AutoModelForCausalLM.from_pretrained(folder), load(folder)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Int8Linear)}
    assert layers.keys() == {name for name, layer in plain.named_modules() if type(layer) is nn.Linear}
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight.float()
        assert layer.weight.dtype == torch.int8 and layer.scale.dtype == torch.float32
        largest = torch.where(weight.abs().amax(1) > 0, 127, 0)
        assert torch.equal(layer.weight.abs().amax(1), largest), "all of int8 is used in each channel"
        step = weight.abs().amax(1, keepdim=True) / 127
        assert ((layer.dense_weight() - weight).abs() <= 0.501 * step).all(), name
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    model.tie_weights()
    assert isinstance(model.lm_head, Int8Linear) and model.lm_head.weight.dtype == torch.int8, "not tied again"


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=needs_compiler), False])
def test_a_layer_and_its_gradient_are_those_of_its_weight(kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(few_rows, "available", lambda: False)
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(70, 37)
    layer = Int8Linear.of(plain)
    weight = layer.weight.double() * layer.scale.double()[:, None]
    monkeypatch.setattr("specheads.decoding.kernels.int8_linear.BLOCK", 700)  # ten channels at a time
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        for shape in ((1, 70), (2, 3, 70), (200, 70), (0, 70), (70,)):
            rows = torch.randn(shape, generator=generator).to(dtype)
            exact = F.linear(rows.double(), weight, plain.bias.double())
            with torch.no_grad():
                found = layer(rows)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
            learns = rows.clone().requires_grad_()
            layer(learns).square().sum().backward()
            twin = rows.double().requires_grad_()
            F.linear(twin, weight, plain.bias.double()).square().sum().backward()
            torch.testing.assert_close(learns.grad.double(), twin.grad, rtol=4 * tolerance, atol=4 * tolerance)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 70)).dtype == torch.bfloat16


def test_what_moves_a_model_leaves_the_scale_in_float32_and_copies_are_the_same(folder):
    layer = Int8Linear.of(nn.Linear(8, 4))
    scale = layer.scale.clone()
    assert torch.equal(layer.to(torch.bfloat16).scale, scale) and layer.bias.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.int8
    model = load(folder, torch.float32)
    text = greedy(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(greedy(other), text)


def test_weights_that_int8_cannot_hold():
    plain = nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        plain.weight[1] = 0
    assert Int8Linear.of(plain).dense_weight()[1].tolist() == [0] * 6
    for wrong in (torch.nan, torch.inf):
        with torch.no_grad():
            plain.weight[2, 4] = wrong
        with pytest.raises(ValueError, match="NaN or infinity"):
            Int8Linear.of(plain)
    with torch.device("meta"), pytest.raises(ValueError, match="weight of 0 is not in memory"):
        to_int8(nn.Sequential(nn.Linear(2, 2)))


@needs_compiler
def test_one_text_with_every_drafter_and_by_transformers(folder, monkeypatch):
    """In both dtypes, by our kernels and by torch's products; as the same weights give in float64."""
    monkeypatch.setattr(few_rows, "MIN_BYTES", 0)
    model = load(folder, torch.float32)
    text = dense_copy(model).generate(IDS, max_new_tokens=14, eos_token_id=None, do_sample=False, pad_token_id=0)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        plain = greedy(model)
        if dtype == torch.float32:
            assert torch.equal(plain, text)
        assert torch.equal(
            model.generate(IDS, max_new_tokens=14, eos_token_id=None, do_sample=False, pad_token_id=0), plain
        )
        for draft in ("lookup", "ngram", "maxgram", specheads.DraftModel(load(folder, dtype))):
            assert torch.equal(greedy(model, draft=draft), plain), (dtype, draft)
        for kind, tree in (("medusa", "static:6"), ("eagle3", "static:6"), ("parallel", "chain:3")):
            head = convert(model, kind, dtype=dtype).head
            assert torch.equal(greedy(model, draft=head, tree=tree), plain), (dtype, kind, tree)
    monkeypatch.setattr(few_rows, "available", lambda: False)
    model = load(folder, torch.float32)
    assert torch.equal(greedy(model), text) and torch.equal(greedy(model, draft="lookup"), text)


@needs_compiler
def test_a_compiled_step_has_the_text_of_an_uncompiled_one(folder, fresh_dynamo, monkeypatch):  # noqa: F811
    monkeypatch.setattr(few_rows, "MIN_BYTES", 0)
    model = load(folder, torch.float32)
    assert torch.equal(greedy(model, draft="lookup", compile="eager"), greedy(model))


def test_a_head_learns_beside_it_and_comes_back_with_it(folder, tmp_path):
    for kind, lora in (("medusa", {"r": 4}), ("eagle3", None), ("parallel", None)):
        model = convert(load_language_model(folder, quantize="int8", dtype="float32"), kind, lora=lora).train()
        tokens = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
        frozen = {name: p.detach().clone() for name, p in model.base.named_parameters() if not p.requires_grad}
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
        for _ in range(6):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0], kind
        assert all(torch.equal(p, frozen[name]) for name, p in model.base.named_parameters() if name in frozen)
        model.eval().save_pretrained(tmp_path / kind)
        again = SpecModel.from_pretrained(tmp_path / kind)
        assert any(isinstance(part, Int8Linear) for part in again.base.modules())
        assert torch.equal(greedy(again.base, draft=again.head), greedy(again.base)), kind
        whole = SpecModel.from_pretrained(tmp_path / kind, base=str(folder))
        assert not any(isinstance(part, Int8Linear) for part in whole.base.modules())


def test_saved_features_keep_the_matrices_that_it_applies(folder, tmp_path):
    model = load(folder, torch.float32)
    save_base_parts(model, tmp_path)
    kept, outline = KeptBase(tmp_path, None), skeleton(tmp_path)
    assert torch.equal(kept.lm_head.weight, model.lm_head.dense_weight())
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        stored, layer = (m.get_submodule(f"model.layers.2.{name}") for m in (outline, model))
        assert torch.equal(stored.weight, layer.dense_weight()), name
    assert torch.equal(kept.embed_tokens.weight, model.get_input_embeddings().weight)


def test_where_it_has_no_sense_and_what_it_cannot_do(folder, tmp_path):
    with pytest.raises(ValueError, match="not serializable"):
        load(folder).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="int8 weights are for CPUs, and device_map has cuda"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=Int8Config(), device_map={"": "cuda"})
    with pytest.raises(ValueError, match="quantize='int9' is unknown; expected 4bit, 8bit, int8"):
        load_language_model(folder, quantize="int9")


def test_an_encoder_decoder_and_its_scaled_tied_output():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    to_int8(model)
    exact = dense_copy(model)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    text = exact.generate(IDS, **options)
    assert torch.equal(specheads.generate(model, IDS, draft="lookup", **options), text)


def test_the_command_line_loads_it_in_the_dtype_of_small_bases(folder, monkeypatch):
    monkeypatch.setattr("specheads.models.named.tokenizer_of", lambda source: None)
    models = Models.load(str(folder), device="cpu", quantize="int8")
    assert isinstance(models.target.lm_head, Int8Linear) and models.target.dtype == torch.float32
