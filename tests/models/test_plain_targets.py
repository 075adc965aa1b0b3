"""Claims about whole models as targets: what their files hold besides keeps none of them from being decoded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specheads import CheckpointError, SpecModel
from specheads.models import named
from specheads.models.formats.importing import find_foreign
from specheads.models.named import holds_head
from tests.support.export_files import made, same
from tests.support.shipped_mtp import write
from tests.support.tiny_models import tiny_llama


def test_a_model_whose_index_has_megabytes_is_a_plain_target(tmp_path):
    """As those of many experts have."""
    tiny_llama().save_pretrained(tmp_path, max_shard_size="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = next(iter(index["weight_map"].values()))
    experts = [f"model.layers.{i}.mlp.experts.{e}.{'x' * 900}.weight" for i in range(10) for e in range(512)]
    index["weight_map"] |= dict.fromkeys(experts, file)
    path.write_text(json.dumps(index))
    assert path.stat().st_size > 4 << 20
    assert find_foreign(tmp_path) is None and not holds_head(str(tmp_path))


def test_the_base_beside_an_export_for_the_eagle_repository_is_a_plain_target(tmp_path):
    """Its index has absolute paths, which transformers reads."""
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    out = made(base, "eagle").export(tmp_path / "out", "eagle")
    assert not holds_head(str(out / "base"))
    assert same(AutoModelForCausalLM.from_pretrained(out / "base").state_dict(), base.state_dict())


def change(folder, **tensors):
    """Put tensors into model.safetensors."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_model_with_a_dtype_that_no_head_has_is_a_plain_target(dtype, tmp_path):
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    change(tmp_path, **{"model.layers.0.mlp.down_proj.weight_scale": torch.zeros(4).to(dtype)})
    assert not holds_head(str(tmp_path))


def test_modules_are_read_beside_other_tensors_of_a_dtype_that_no_head_has(tmp_path):
    modules = write(tmp_path, "deepseek_v3", sharded=False)
    change(tmp_path, **{"model.layers.0.mlp.down_proj.weight_scale": torch.zeros(4, dtype=torch.uint8)})
    assert holds_head(str(tmp_path))
    assert find_foreign(tmp_path).part.shapes.keys() == modules.keys()


REFUSED = {
    "names": ({"mtp.layers.0.transformer_block.mlp.weight": torch.zeros(2)}, "Inkling's modules"),
    "quantised": (
        {"model.layers.3.eh_proj.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)},
        "eh_proj.weight is quantised",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_whose_modules_no_head_can_hold_is_a_plain_target_and_the_reason_is_logged_once(
    case, tmp_path, monkeypatch
):
    changed, why = REFUSED[case]
    write(tmp_path, "deepseek_v3", sharded=False)
    change(tmp_path, **changed)
    warned = []
    monkeypatch.setattr(named.logger, "warning_once", lambda text, *values: warned.append(text % values))
    assert not holds_head(str(tmp_path))
    (line,) = warned
    assert why in line and "decoded without" in line
    with pytest.raises(CheckpointError, match=why):
        SpecModel.from_pretrained(tmp_path)


def test_a_model_of_one_layer_in_a_pickle_is_a_plain_target(tmp_path):
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert not holds_head(str(tmp_path))
