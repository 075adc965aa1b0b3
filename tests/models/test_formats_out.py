"""Claims about where an export is written: any folder that is empty or not there yet, however it is named."""

from __future__ import annotations

import json

import pytest
import torch

from specheads import CheckpointError
from tests.support.export_files import imported, made, same


@pytest.mark.parametrize("out", ["an empty folder", "a link to one", "a link to none yet"])
def test_an_export_goes_into_an_empty_folder_and_through_a_link(out, base, tmp_path):
    model, real = made(base, "eagle3"), tmp_path / "real"
    given = real if out == "an empty folder" else tmp_path / "link"
    if out != "a link to none yet":
        real.mkdir()
    if given != real:
        given.symlink_to(real)
    made_before = real.stat().st_ino if real.exists() else None
    assert model.export(given, "vllm") == given
    assert given.is_symlink() == (given != real)
    assert made_before in (None, real.stat().st_ino)  # a mount point cannot be replaced
    assert same(imported(real, base).head_state_dict(), model.head_state_dict())
    assert {path.name for path in real.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"real", given.name}
    assert str(real) in (real / "README.md").read_text()


def test_an_empty_folder_stays_empty_if_the_export_fails(base, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("the disk is full")))
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="the disk is full"):
        made(base, "eagle3").export(tmp_path / "out", "vllm")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("below", ["file/out", "file/deeper/out"])
def test_a_folder_below_a_file_is_one_clear_line(below, base, tmp_path):
    (tmp_path / "file").write_text("mine")
    model = made(base, "eagle3")
    for write in (lambda: model.export(tmp_path / below, "vllm"), lambda: model.save_pretrained(tmp_path / below)):
        with pytest.raises(CheckpointError, match=r"file is a file, and nothing can be written below it"):
            write()


def test_a_dtype_in_which_no_head_is_read_is_refused(base, tmp_path):
    model = made(base, "eagle3")
    with pytest.raises(ValueError, match=r"dtype=torch\.float8_e4m3fn: .* expected float64, float32, .*bfloat16"):
        model.export(tmp_path / "out", "vllm", dtype=torch.float8_e4m3fn)
    assert not (tmp_path / "out").exists()
    model.export(tmp_path / "out", "vllm", dtype=torch.float16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


def test_the_topmost_folder_is_refused_like_any_other_that_holds_files(base):
    """Where a container begins: `specheads export HEAD .` there ended in a StopIteration."""
    with pytest.raises(CheckpointError, match="/ exists and is not an empty directory"):
        made(base, "eagle3").export("/", "vllm")
