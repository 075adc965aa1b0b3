"""Claims about exported MTP modules beside a base that ships modules, or files, of its own: the index names the new
modules alone, no tensor of the base is lost, and what reads them back finds the same head."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specheads import CheckpointError, SpecModel, convert
from tests.support.shipped_mtp import write


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def base_in(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_comes_back(model, out):
    again = SpecModel.from_pretrained(out)
    assert again.head.config.num_modules == model.head.config.num_modules
    assert again.head.config.layer_indices == model.head.config.layer_indices
    state = model.head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.head.state_dict().items())
    assert all(map(torch.equal, again.base.state_dict().values(), model.base.state_dict().values()))


@pytest.mark.parametrize("base", ["ships three", "is an earlier export"])
def test_fewer_modules_than_the_base_ships_are_all_that_is_read_back(base, tmp_path):
    folder = tmp_path / "target"
    write(folder, "deepseek_v3, three modules")
    if base == "is an earlier export":
        folder = SpecModel.from_pretrained(folder).export(tmp_path / "first", "mtp")
    model = convert(base_in(folder), "mtp", num_modules=1)
    out = model.export(tmp_path / "out", "mtp")
    modules = {name for name in index_of(out) if name.startswith(("model.layers.3.", "model.layers.4."))}
    assert modules == load_file(out / "mtp.safetensors").keys()
    assert all((out / file).is_file() for file in index_of(out).values())
    assert_comes_back(model, out)


def test_a_tensor_that_the_base_keeps_in_its_own_mtp_file_is_not_lost(tmp_path):
    folder = tmp_path / "target"
    modules = write(folder, "deepseek_v3", sharded=False)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    own = {name: tensor for name, tensor in tensors.items() if name in modules or name == "lm_head.weight"}
    files = {"model-1.safetensors": {n: t for n, t in tensors.items() if n not in own}, "mtp.safetensors": own}
    for name, held in files.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, held in files.items() for tensor in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = SpecModel.from_pretrained(folder)
    with torch.no_grad():
        model.head.mtp[0].enorm.weight.add_(1)
    out = model.export(tmp_path / "out", "mtp")
    assert_comes_back(model, out)
    named = index_of(out)["model.layers.3.enorm.weight"]
    assert named > index_of(out)["lm_head.weight"] == "mtp.safetensors"  # readers of all files take the last


def test_modules_of_another_form_than_the_shipped_ones_are_refused(tmp_path):
    """No reader of the family knows them: it builds the layer of the published ones."""
    write(tmp_path / "target", "exaone_moe")
    base = base_in(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"lack mtp\.layers\.0\.mlp\.experts.* layer_indices"):
        convert(base, "mtp").export(tmp_path / "out", "mtp")
    model = convert(base, "mtp", layer_indices=(0,))
    assert_comes_back(model, model.export(tmp_path / "out", "mtp"))


def test_a_kind_of_layer_that_nothing_in_the_files_tells_is_refused(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(**sizes, **heads, sliding_window=8, use_sliding_window=True, layer_types=types)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "target")
    base = base_in(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"layer 1 .*sliding_attention.*full_attention.*layer_indices"):
        convert(base, "mtp", layer_indices=(1,), hidden_first=True).export(tmp_path / "out", "mtp")
    convert(base, "mtp", layer_indices=(0,), hidden_first=True).export(tmp_path / "out", "mtp")


def test_a_dtype_for_the_export_leaves_the_biases_that_choose_experts_alone(tmp_path):
    modules = write(tmp_path / "target", "deepseek_v3")
    out = SpecModel.from_pretrained(tmp_path / "target").export(tmp_path / "out", "mtp", dtype="bfloat16")
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    written = load_file(out / "mtp.safetensors")
    assert torch.equal(written[name], modules[name]) and written[name].dtype == torch.float32
    assert written["model.layers.3.enorm.weight"].dtype == torch.bfloat16
