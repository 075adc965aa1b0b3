"""Claims about the base that an export for the EAGLE repository has beside it: as transformers 4 reads one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.data import corpus
from tests.support.export_files import made
from tests.support.markdown import blocks
from tests.support.tiny_models import tiny_llama


def base_in(folder, rope, shards):
    """A base on disk with the shipped tokenizer, as transformers 5 saves both."""
    tiny_llama(rope_parameters=rope).save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    AutoTokenizer.from_pretrained(corpus.checkpoints_dir() / "base").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_export_for_the_eagle_repository_has_the_base_as_transformers_4_reads_it(kind, shards, tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    base = base_in(tmp_path / "base", rope, shards)
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    assert ("model.safetensors.index.json" in before) == shards
    plain = {"rope_theta": 10000.0}  # the head's own, not its base's
    out = made(base, kind, **plain, **({"draft_vocab_size": 40} if kind == "eagle3" else {})).export(
        tmp_path / "out", "eagle"
    )
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}

    index = json.loads((out / "base" / "model.safetensors.index.json").read_text())["weight_map"]
    weights = {name: t for name, t in base.state_dict().items() if name in index}
    assert "model.embed_tokens.weight" in index and len(index) >= 8 * 9 + 2
    for (
        name,
        file,
    ) in index.items():  # as the repository opens it: below the base's folder, which an absolute path is not
        with safe_open(Path(out / "base", file), "pt") as opened:
            assert torch.equal(opened.get_tensor(name), weights[name])

    config = json.loads((out / "base" / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"]) == (500.0, "float32")
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}
    tokenizer = json.loads((out / "base" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast" and tokenizer["pad_token"] == "<|pad|>"
    assert tokenizer["additional_special_tokens"] == ["<|user|>", "<|assistant|>"]
    assert "extra_special_tokens" not in tokenizer and "message" in tokenizer["chat_template"]
    own, again = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "base", out / "base"))
    text = "<|user|>def f(x):\n    return x  # {folder}\n"
    assert own(text)["input_ids"] == again(text)["input_ids"]
    program, *_ = blocks((out / "README.md").read_text(), "python")
    assert f'base_model_path="{out}/base", ea_model_path="{out}"' in program


def test_a_base_in_memory_is_left_out(base, tmp_path):
    out = made(base, "eagle3").export(tmp_path / "out", "eagle")
    assert not (out / "base").exists() and 'base_model_path="BASE"' in (out / "README.md").read_text()
