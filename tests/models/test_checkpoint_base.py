"""Claims about specheads/models/checkpoint.py: which base a head goes back to, and which it refuses or warns of."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from specheads import CheckpointError, SpecModel, convert, load_head
from specheads.models import checkpoint
from specheads.models.base.fingerprint import differences
from tests.support.families import DELTA
from tests.support.heads_on_disk import edit_config, same, trained
from tests.support.tiny_models import tiny_llama, tiny_llava, with_adapter

pytestmark = pytest.mark.usefixtures("offline")


def test_base_overrides_the_recorded_one(named, base_dir, tmp_path):
    model = trained(named, "medusa")
    model.save_pretrained(tmp_path / "head")
    other = tmp_path / "elsewhere"
    shutil.copytree(base_dir, other)
    in_memory = tiny_llama()
    assert SpecModel.from_pretrained(tmp_path / "head", base=in_memory).base is in_memory
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "head", base=in_memory).base is in_memory
    for base in (other, str(other)):
        restored = SpecModel.from_pretrained(tmp_path / "head", base=base)
        assert restored.base.name_or_path == str(other) == restored.config.base_model_name_or_path
        assert same(restored, model)


def test_checkpoint_and_base_move_together(named, tmp_path):
    base = tmp_path / "here" / "models" / "base"
    named.save_pretrained(base)
    model = trained(AutoModelForCausalLM.from_pretrained(base), "medusa")
    model.save_pretrained(tmp_path / "here" / "heads" / "first")
    model.save_pretrained(base / "head")
    model.save_pretrained(base.parent)
    moved = tmp_path / "there"
    (tmp_path / "here").rename(moved)
    for folder in (moved / "heads" / "first", moved / "models" / "base" / "head", moved / "models"):
        restored = SpecModel.from_pretrained(folder)
        assert same(restored, model)
        assert Path(restored.base.name_or_path) == moved / "models" / "base"
        assert restored.name_or_path == str(folder)
        assert str(tmp_path) not in (folder / "config.json").read_text("utf8"), "a path of this machine got out"


def test_a_restored_head_saved_elsewhere_still_finds_its_base(named, tmp_path, monkeypatch):
    trained(named, "medusa").save_pretrained(tmp_path / "a")
    SpecModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b" / "c" / "d")
    assert str(tmp_path) not in (tmp_path / "b" / "c" / "d" / "config.json").read_text("utf8")
    assert SpecModel.from_pretrained(tmp_path / "b" / "c" / "d").base.name_or_path == named.name_or_path
    # also beside a base in memory that has no name, from a relative path, after a change of directory
    monkeypatch.chdir(tmp_path)
    model = load_head(tiny_llama(), "a")
    monkeypatch.chdir("/")
    model.save_pretrained(tmp_path / "e" / "f")
    assert SpecModel.from_pretrained(tmp_path / "e" / "f").base.name_or_path == named.name_or_path


def test_a_base_that_is_gone_is_asked_for(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = trained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "medusa")
    model.save_pretrained(tmp_path / "head")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"base model of .* is not at .*base; give its path with base(=|$| )"):
        SpecModel.from_pretrained(tmp_path / "head")
    assert same(SpecModel.from_pretrained(tmp_path / "head", base=tiny_llama()), model)
    with pytest.raises(
        CheckpointError, match=r"base model '/nowhere' .* cannot be loaded; give another with base(=|$| )"
    ):
        SpecModel.from_pretrained(tmp_path / "head", base="/nowhere")


def test_a_base_on_the_hub_that_cannot_be_had_is_asked_for(tmp_path):
    base = tiny_llama()
    base.config.name_or_path = base.name_or_path = "someone/some-model"
    trained(base, "medusa").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "someone/some-model"
    with pytest.raises(CheckpointError, match=r"base model 'someone/some-model' .* give another with base(=|$| )"):
        SpecModel.from_pretrained(tmp_path)


def test_the_recorded_revision_is_of_the_recorded_base_only(named, base_dir, tmp_path, monkeypatch):
    trained(named, "medusa").save_pretrained(tmp_path)
    edit_config(tmp_path, base_revision="abc", base_model_name_or_path="someone/some-model")
    asked = []

    def from_pretrained(name, **kwargs):
        asked.append((name, kwargs.get("revision"), kwargs.get("token"), "adapter_kwargs" in kwargs))
        return tiny_llama()

    monkeypatch.setattr(checkpoint, "load_language_model", from_pretrained)
    monkeypatch.setattr(checkpoint, "hub_options", lambda name, **given: {})
    SpecModel.from_pretrained(tmp_path, revision="of-the-head", token="secret", adapter_kwargs={}, subfolder="")
    SpecModel.from_pretrained(tmp_path, base="another/model")
    assert asked == [("someone/some-model", "abc", "secret", False), ("another/model", None, None, False)]


def test_a_checkpoint_that_names_no_base_asks_for_one(base, tmp_path):
    model = trained(base, "eagle")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not name the base it was trained for; give it with base(=|$| )"):
        SpecModel.from_pretrained(tmp_path)
    assert same(SpecModel.from_pretrained(tmp_path, base=base), model)


def test_a_base_of_other_sizes_is_refused_with_every_difference(named, tmp_path):
    trained(named, "medusa").save_pretrained(tmp_path)
    other = tiny_llama(hidden_size=48, num_hidden_layers=4, vocab_size=90, num_attention_heads=6)
    with pytest.raises(CheckpointError, match="was trained for another base") as error:
        load_head(other, tmp_path)
    for difference in (
        "hidden_size is 48, not 32", "num_hidden_layers is 4, not 8", "vocab_size is 90, not 97",
        "num_attention_heads is 6, not 4",
    ):  # fmt: skip
        assert difference in str(error.value)
    assert "intermediate_size" not in str(error.value)
    edit_config(tmp_path, base_fingerprint=None)
    with pytest.raises(CheckpointError, match="hidden_size is 48, not 32, vocab_size is 90, not 97"):
        load_head(other, tmp_path)
    with pytest.raises(ValueError, match="convert"):
        load_head(convert(named, "eagle"), tmp_path)


def test_a_base_of_other_weights_is_a_warning(named, tmp_path, hf_log):
    model = trained(named, "medusa")
    model.save_pretrained(tmp_path / "head")
    load_head(tiny_llama(), tmp_path / "head")
    load_head(tiny_llama().to(torch.bfloat16), tmp_path / "head")
    assert "weights differ" not in hf_log.text
    tuned = tiny_llama()
    with torch.no_grad():
        tuned.model.layers[3].mlp.up_proj.weight.mul_(1.1)  # as a merged adapter would
    restored = load_head(tuned, tmp_path / "head")
    assert same(restored, model) and "weights differ from this base's" in hf_log.text
    # saved again, it is a head of the base it now sits on
    hf_log.clear()
    restored.save_pretrained(tmp_path / "again")
    load_head(tuned, tmp_path / "again")
    assert "weights differ" not in hf_log.text


def test_a_dtype_of_the_base_is_no_other_base(tmp_path, hf_log):
    """float32 rounds to bfloat16 otherwise by way of float16, in which small weights are lost besides."""
    base = tiny_llama(initializer_range=1e-7)
    bases = {dtype: copy.deepcopy(base).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for saved in bases.values():
        trained(saved, "medusa").save_pretrained(tmp_path)
        for loaded in bases.values():
            load_head(loaded, tmp_path)
            assert "weights differ" not in hf_log.text
    tuned = copy.deepcopy(bases[torch.float16])
    tuned.model.norm.weight.data *= 2
    load_head(tuned, tmp_path)
    assert "weights differ" in hf_log.text, "of one dtype they are compared, float16 too"


def test_a_head_trained_on_an_adapter_says_so_beside_the_bare_base(named, tmp_path, hf_log):
    adapted = with_adapter()
    model = trained(adapted, "eagle")
    model.save_pretrained(tmp_path)
    assert same(load_head(adapted, tmp_path), model)
    assert "weights differ" not in hf_log.text
    load_head(named, tmp_path)
    assert "weights differ" in hf_log.text


def test_fingerprints_differ_in_what_both_know_alone():
    own = {"hidden_size": 32, "vocab_size": 97, "weights": "ab"}
    assert differences(own, {**own, "vocab_size": 98, "weights": "cd"}) == ["vocab_size", "weights"]
    assert differences(own, {"vocab_size": None, "weights": "float16:cd"}) == []
    assert differences(own, {}) == differences({}, own) == []


def seeing(name):
    """A tiny random model that reads images too, of a config that names no other class (Llava) or one without them."""
    if name == "Llava":
        return tiny_llava(num_hidden_layers=2)
    torch.manual_seed(0)
    text = {
        **DELTA, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
             "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=tower)
    return transformers.Qwen3_5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", ["Llava", "Qwen3.5"])
def test_a_base_that_reads_images_is_found_again_by_name(name, tmp_path, hf_log):
    seeing(name).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    model = trained(base, "medusa")
    model.save_pretrained(tmp_path / "head")
    for given in (None, tmp_path / "base"):
        again = SpecModel.from_pretrained(tmp_path / "head", base=given)
        assert type(again.base) is type(base) and same(again, model)
    assert not any("weights differ" in message for message in hf_log.messages)
    edit_config(tmp_path / "head", base_class=None)  # as saved by earlier versions
    earlier = SpecModel.from_pretrained(tmp_path / "head").base
    assert type(earlier) is (type(base) if name == "Llava" else transformers.Qwen3_5ForCausalLM)
    assert type(convert(tmp_path / "base", "medusa").base) is type(earlier)
