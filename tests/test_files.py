"""Claims about specheads/files.py: a file is written whole or not at all."""

from __future__ import annotations

import os
import stat

import pytest

from specheads.files import replacing
from tests.support.killable_fork import fork


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def write_half(path, error):
    with replacing(path) as temporary:
        temporary.write_text("hal")
        raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize("there", [True, False])
def test_a_write_that_ends_early_leaves_what_was_there_and_no_litter(tmp_path, there, error):
    path = tmp_path / "a.json"
    if there:
        path.write_text("before")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert os.listdir(tmp_path) == (["a.json"] if there else [])
    assert not there or path.read_text() == "before"


@pytest.mark.parametrize("name", ["a.json", "a[1]*.json"])
def test_what_a_killed_write_left_is_removed_by_the_next(tmp_path, name):
    path = tmp_path / name
    path.write_text("before")
    if (child := fork()) == 0:
        with replacing(path) as temporary:
            temporary.write_text("hal")
            os._exit(0)
    os.waitpid(child, 0)
    assert path.read_text() == "before" and len(os.listdir(tmp_path)) == 2
    others = [".a1.json.0123abcd", f".{name}.orig"]  # another file's, and nobody's
    for other in others:
        (tmp_path / other).mkdir()
    with replacing(path) as temporary:
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == sorted([*others, name])


@pytest.mark.usefixtures("umask")
def test_the_file_has_the_mode_of_a_new_one(tmp_path):
    path = tmp_path / "a.json"
    path.touch(0o600)
    with replacing(path) as temporary:
        temporary.unlink()
        temporary.touch(0o600)  # as safetensors does
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path):
    """A folder of the hub's cache holds links to files that other folders share."""
    shared, link = tmp_path / "shared", tmp_path / "a.json"
    shared.write_text("before")
    link.symlink_to(shared)
    with replacing(link) as temporary:
        temporary.write_text("after")
    assert (link.read_text(), shared.read_text(), link.is_symlink()) == ("after", "before", False)


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path, monkeypatch):
    (tmp_path / "folder" / "below").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as raised, replacing(tmp_path / "folder"):
        pass
    assert (raised.value.filename, raised.value.filename2) == (str(tmp_path / "folder"), None)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_half(tmp_path / "a.json", OSError(28, "No space left on device"))
    assert raised.value.filename == str(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError) as raised, replacing(tmp_path / "none" / "a.json"):
        pass
    assert raised.value.filename == str(tmp_path / "none" / "a.json")

    def refused(path, mode=0):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.mkdir", refused)
    with pytest.raises(PermissionError) as raised, replacing(tmp_path / "a.json"):
        pass
    assert raised.value.filename == str(tmp_path / "a.json")
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["below"]
