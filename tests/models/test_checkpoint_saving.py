"""Claims about specheads/models/checkpoint.py: what a save writes, where, and what it refuses to write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load

from specheads import CheckpointError, load_head
from tests.support.heads_on_disk import FILES, contents, same, state, trained

pytestmark = pytest.mark.usefixtures("offline")


def test_saving_leaves_other_files_alone(named, tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "optimizer.pt").write_bytes(b"state")
    (tmp_path / "global_step1").mkdir()
    first, second = trained(named, "medusa", 1), trained(named, "eagle", 2)
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path), second)
    assert (tmp_path / "trainer_state.json").read_text() == "{}" and (
        tmp_path / "optimizer.pt"
    ).read_bytes() == b"state"
    assert {p.name for p in tmp_path.iterdir()} == FILES | {"trainer_state.json", "optimizer.pt", "global_step1"}


def test_options_changed_in_memory_are_saved(named, tmp_path):
    model = trained(named, "eagle3")
    model.head.config = replace(model.head.config, draft_depth=2, loss="tv")
    model.save_pretrained(tmp_path)
    again = load_head(named, tmp_path)
    assert (again.head.config.draft_depth, again.head.config.loss) == (2, "tv")
    assert again.head.config == model.head.config and same(again, model)


def test_saving_makes_parent_folders_and_refuses_a_file(named, tmp_path):
    model = trained(named, "medusa")
    model.save_pretrained(str(tmp_path / "a" / "b"))
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == FILES
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file; give a directory to save into"):
        model.save_pretrained(tmp_path / "file")


def test_a_head_is_saved_through_a_link_to_a_folder_that_is_not_there_yet(named, tmp_path):
    model = trained(named, "medusa")
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "head")
    model.save_pretrained(tmp_path / "link")
    assert {path.name for path in (tmp_path / "scratch" / "head").iterdir()} == FILES
    assert same(load_head(named, tmp_path / "link"), model)


def test_a_head_is_not_saved_over_a_model(named, tmp_path):
    named.save_pretrained(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="holds a llama model, which the head's files would replace"):
        trained(named, "medusa").save_pretrained(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("config", ['{"medusa_num_heads": 2}', '{"model_type": null}', '{"model_type": "eagle9"}'])
def test_a_head_is_not_saved_over_a_model_of_another_program(named, tmp_path, config):
    (tmp_path / "config.json").write_text(config, "utf8")
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds (another program's|a eagle9) model, which the head's files would"
    ):
        trained(named, "medusa").save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def test_only_the_main_process_writes(named, tmp_path):
    trained(named, "medusa").save_pretrained(tmp_path / "a", is_main_process=False, push_to_hub=True, repo_id="a/b")
    assert not (tmp_path / "a").exists()


def test_files_can_be_read_by_whom_the_umask_allows(named, tmp_path):
    (tmp_path / "plain").touch()
    trained(named, "medusa").save_pretrained(tmp_path)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_saving_does_not_touch_model_or_random_numbers(named, tmp_path):
    model = trained(named, "eagle3")
    before, rng = {name: t.clone() for name, t in state(model).items()}, torch.get_rng_state()
    config = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in state(model).items())
    assert torch.equal(torch.get_rng_state(), rng) and model.config.to_dict() == config


@pytest.mark.parametrize("part", ["all", "some", "own"])
def test_parameters_that_a_launcher_holds_in_shards_are_refused(named, tmp_path, part):
    """DeepSpeed ZeRO-3 leaves empty tensors behind."""
    model = trained(named, "eagle3")
    given = {name: torch.empty(0) for name in state(model)} if part == "all" else dict(state(model))
    if part == "some":
        given["head.fc.weight"] = torch.empty(0)
    if part == "own":
        for parameter in model.head.parameters():
            parameter.data = torch.empty(0)
        given = None
    with pytest.raises(
        CheckpointError, match=r"head.fc.weight has shape \(0,\), not .*stage3_gather_16bit_weights"
    ) as e:
        model.save_pretrained(tmp_path / "out", state_dict=given)
    assert "does not hold the whole head" in str(e.value)
    assert not (tmp_path / "out").exists()


def test_shards_that_know_the_whole_are_refused_too(named, tmp_path):
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    model = trained(named, "eagle3")
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model.head)
        with pytest.raises(CheckpointError, match=r"its tensors are shards.*accelerator.get_state_dict\(model\)"):
            model.save_pretrained(tmp_path)
        assert not contents(tmp_path)
        gathered = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state(model).items()}
        model.save_pretrained(tmp_path, state_dict=gathered)
    finally:
        destroy_process_group()
    restored = load_head(named, tmp_path)
    assert all(torch.equal(t, gathered[name]) for name, t in state(restored).items())


def test_a_gathered_state_dict_is_what_is_saved(named, tmp_path):
    model = trained(named, "eagle")
    gathered = {name: t + 1 for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert all(torch.equal(t, gathered[name]) for name, t in state(load_head(named, tmp_path)).items())
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for lacking in ({}, model.head.state_dict(), {n: t for n, t in gathered.items() if n != "head.fc.weight"}):
        with pytest.raises(CheckpointError, match=r"missing \[.*'head.fc.weight'"):
            model.save_pretrained(tmp_path, state_dict=lacking)


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
def test_pushing_uploads_the_heads_files_alone(named, tmp_path, monkeypatch, by):
    uploads = []

    class Api:
        def __init__(self, token):
            self.token = token

        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": f"someone/{repo_id}"})

        def file_exists(self, repo_id, name, revision=None):
            return False

        def upload_folder(self, repo_id, folder_path, ignore_patterns, **kwargs):
            assert (folder_path / "model.safetensors").stat().st_size < 100_000 and ignore_patterns is None
            uploads.append((repo_id, {path.name for path in folder_path.iterdir()}, self.token))
            return "https://example.org"

    monkeypatch.setattr("specheads.hub.HfApi", Api)
    model = trained(named, "medusa")
    if by == "push_to_hub":
        model.push_to_hub("my-head", token="secret")
    else:
        (tmp_path / "my-head").mkdir()
        (tmp_path / "my-head" / "optimizer.pt").write_bytes(b"private")
        model.save_pretrained(tmp_path / "my-head", push_to_hub=True, token="secret")
        assert same(load_head(named, tmp_path / "my-head"), model)
    [(repo_id, files, token)] = uploads
    assert (repo_id, set(files), token) == ("someone/my-head", FILES | {"README.md"}, "secret")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_gathered_state_dict_is_what_is_uploaded(named, tmp_path, monkeypatch, sharded):
    """The card as well is of the whole head, not of what a launcher leaves in memory."""
    model, uploads = trained(named, "eagle"), []
    gathered = {name: t + 1 for name, t in state(model).items()}
    size = sum(p.numel() for p in model.head.parameters())
    if sharded:
        for parameter in model.head.parameters():
            parameter.data = torch.empty(0)

    def upload(folder, repo_id, **options):
        uploads.append((repo_id, options, contents(folder)))

    monkeypatch.setattr("specheads.models.spec_model.upload", upload)
    model.save_pretrained(tmp_path / "out", state_dict=gathered, push_to_hub=True, private=True)
    [(repo_id, options, files)] = uploads
    assert (repo_id, options) == ("out", {"private": True})
    there, here = load(files["model.safetensors"]), load((tmp_path / "out" / "model.safetensors").read_bytes())
    assert all(torch.equal(there[name], t) and torch.equal(here[name], t) for name, t in gathered.items())
    assert f" {size / 1e6:.2f}M parameters" in (card := files["README.md"].decode()) and "--to vllm" in card
