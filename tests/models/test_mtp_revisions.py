"""Claims about models of the hub that ship MTP modules: modules, base and exports are of one commit and one folder."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specheads import CheckpointError, SpecModel, convert
from tests.support.shipped_mtp import write

MAIN, OTHER = "a" * 40, "b" * 40
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def mimo(tmp_path, monkeypatch, offline):
    """Commit → its folder, of org/mimo in the hub's cache: main, and v2 with other embeddings."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--mimo"
    (repository / "refs").mkdir(parents=True)
    folders = {}
    for ref, commit in (("main", MAIN), ("v2", OTHER)):
        (repository / "refs" / ref).write_text(commit)
        folders[commit] = repository / "snapshots" / commit
        folders[commit].mkdir(parents=True)
        write(folders[commit], "mimo", sharded=False)
    path = folders[OTHER] / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, EMBED: 2 * tensors[EMBED]}, path, metadata={"format": "pt"})
    return folders


@pytest.mark.parametrize(("revision", "commit"), [("v2", OTHER), (OTHER, OTHER), (None, MAIN)])
def test_base_and_modules_are_of_one_commit_and_so_is_the_export(revision, commit, mimo, tmp_path):
    model = SpecModel.from_pretrained("org/mimo", revision=revision)
    assert torch.equal(model.base.get_input_embeddings().weight, load_file(mimo[commit] / "model.safetensors")[EMBED])
    assert model.config.base_revision == commit
    model.save_pretrained(tmp_path / "head")
    again = SpecModel.from_pretrained(tmp_path / "head")
    assert torch.equal(again.base.get_input_embeddings().weight, model.base.get_input_embeddings().weight)
    out = model.export(tmp_path / "out", "mtp")
    links = [os.readlink(path) for path in out.iterdir() if path.is_symlink()]
    assert links and all(commit in link for link in links)


def test_a_base_that_may_be_of_either_commit_is_not_exported_beside(mimo, tmp_path):
    base = AutoModelForCausalLM.from_pretrained("org/mimo", revision="v2")
    base.config._commit_hash = None  # as transformers 5.23 has it
    model = convert(base, "mtp", num_modules=2, hidden_first=True)
    with pytest.raises(CheckpointError, match=r"2 commits of org/mimo, .* load it from a folder"):
        model.export(tmp_path / "out", "mtp")


def test_a_model_in_a_subfolder_is_loaded_from_there_again(tmp_path):
    write(tmp_path / "models" / "mimo", "mimo", sharded=False)
    model = SpecModel.from_pretrained(tmp_path / "models", subfolder="mimo")
    assert model.head.config.num_modules == 2
    model.save_pretrained(tmp_path / "head")
    assert SpecModel.from_pretrained(tmp_path / "head").head.config == model.head.config
