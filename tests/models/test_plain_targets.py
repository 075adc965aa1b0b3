"""Claims about whole models as targets: what their files hold besides keeps none of them from being decoded."""

from __future__ import annotations

import json

from transformers import AutoModelForCausalLM

from specheads.models.formats.importing import find_foreign
from specheads.models.named import holds_head
from tests.support.export_files import made, same
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
