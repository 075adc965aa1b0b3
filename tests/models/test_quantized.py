"""Heads and adapters learn beside a base that bitsandbytes quantised, and come back with it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from specheads import SpecModel, convert
from specheads.models.base import loading
from specheads.training.recipe.recipe import RecipeError, read_recipe
from specheads.training.run import prepare
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama
from tests.support.training_runs import overrides

CONFIGS = {
    4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    8: {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base_folder = tmp_path_factory.mktemp("quantized") / "base"
    tiny_llama(num_hidden_layers=3, hidden_size=64, intermediate_size=128).save_pretrained(base_folder)
    return base_folder


def load(folder, bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = BitsAndBytesConfig(**CONFIGS[bits])
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.mark.parametrize("bits", CONFIGS)
@pytest.mark.parametrize(("kind", "options"), [("medusa", {"lora": {"r": 4}}), ("eagle3", {}), ("parallel", {})])
def test_a_head_learns_beside_a_quantised_base_and_both_come_back(kind, options, bits, folder, tmp_path):
    model = convert(load(folder, bits), kind, **options)
    tokens = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    with torch.no_grad():
        model(**batch)  # on processors with AVX512-BF16 the first pass of layers in 4 bits lays them out anew
    model.train()
    frozen = {name: p.detach().clone() for name, p in model.base.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.is_floating_point() for p in trained)
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for _ in range(6):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.base.named_parameters() if name in frozen)
    model.eval().save_pretrained(tmp_path / "head")
    again = SpecModel.from_pretrained(tmp_path / "head")
    kept_as = {type(m).__name__ for m in again.base.modules()}
    assert f"Linear{bits}{'bit' if bits == 4 else 'bitLt'}" in kept_as
    with torch.no_grad():
        again(**batch)
        assert torch.equal(again(**batch).loss, model(**batch).loss)
    drafted = again.generate(tokens[:, :6], max_new_tokens=10, do_sample=False)
    assert torch.equal(drafted, model.generate(tokens[:, :6], max_new_tokens=10, do_sample=False))
    if bits == 4:  # the eighth bit rounds activations by what else is in a pass
        plain = again.generate(tokens[:, :6], max_new_tokens=10, do_sample=False, draft=False)
        assert torch.equal(drafted, plain)


def test_a_base_whose_weights_a_pass_has_packed_is_refused(folder):
    base = load(folder, 4).eval()
    layer = base.model.layers[0].self_attn.q_proj
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        pytest.skip("bitsandbytes packs weights only on CPUs with AVX512-BF16")
    with torch.no_grad():
        base(torch.tensor([[5, 6, 7]]))
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.q_proj: its first pass has packed .* load the base again"
    ):
        convert(base, "medusa")


@pytest.mark.parametrize("bits", CONFIGS)
def test_a_head_starts_from_the_weights_that_quantised_layers_apply(bits, folder):
    # The one head whose block starts as the base's last layer, but for its output matrices.
    bases = AutoModelForCausalLM.from_pretrained(folder), load(folder, bits)
    whole, block = (convert(base, "hydra", prefix_layer=True).head.prefix.block for base in bases)
    for name in ("q_proj", "k_proj", "up_proj", "gate_proj"):
        given, own = getattr(whole, name).weight, getattr(block, name).weight
        assert 0 < (given - own).norm() < {4: 0.15, 8: 0.02}[bits] * given.norm(), name


def test_a_recipe_says_quantize(material, folder, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    AutoTokenizer.from_pretrained(material / "base").save_pretrained(folder)
    given = overrides(material, tmp_path, 2, "lora.r=2", "quantize=4bit", f"base={folder}")
    options = [option for option in given if option != "head.steps=2"]
    prepare(
        read_recipe(ROOT / "recipes" / "medusa2.yaml", [*options, "training.max_steps=2", "parity.prompts=0"])
    ).train()
    model = SpecModel.from_pretrained(tmp_path)
    assert type(model.base.model.layers[0].self_attn.q_proj.base_layer).__name__ == "Linear4bit"
    assert "quantize: 4bit" in (tmp_path / "recipe.yaml").read_text()


def test_without_bitsandbytes_a_quantised_base_is_an_error_that_says_what_to_install(material, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "is_bitsandbytes_available", lambda: False)
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "quantize=8bit"))
    with pytest.raises(ImportError, match="quantize=8bit needs bitsandbytes: pip install bitsandbytes"):
        prepare(recipe)
    with pytest.raises(RecipeError, match="unknown quantize '3bit'"):
        read_recipe(ROOT / "recipes" / "eagle3.yaml", ["quantize=3bit"])
