"""Claims about specheads/files.py: a file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time

import pytest

from specheads.bench import report
from specheads.bench.compare import report as compare_report
from specheads.bench.environment import environment
from specheads.decoding.generation.recorded import Record
from specheads.decoding.planner.by_cost import CostTable
from specheads.files import replacing, write_whole
from tests.support.auto_costs import costs
from tests.support.full_disk import fill_disk
from tests.support.killable_fork import fork


def write_comparison(folder, number):
    record = {
        "command": "", "environment": environment(), "peers": {}, "reference": "transformers", "dtype": "float32",
        "max_new_tokens": number, "lowest_limit": None, "queue": None, "turns": "texts", "repeats": 1,
        "complete": True,
        "floor": {"seconds": 1.0, "weight_bytes": 1, "bandwidth": 1.0},
        "prompt_sets": {}, "left_out": {}, "rows": [], "rounds": [],
    }  # fmt: skip
    compare_report.write(folder, record, plots=False)


# Each writes its files into a folder, with other contents for each number.
REPORTS = {
    "figures": lambda folder, number: report.write(folder, "figures", f"# {number}", {"a": number}),
    "bench": write_comparison,
}
WRITERS = REPORTS | {
    "costs": lambda folder, number: CostTable(None, {number: costs()}).save(folder / "costs.json"),
    "record": lambda folder, number: Record(9, number, {(1,): (2,)}).save(folder / "record.json"),
}


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


def test_two_processes_may_write_one_file_at_once_and_the_last_wins(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path, shared=True) as temporary:
        temporary.write_text("last")
        if (child := fork()) == 0:
            write_whole(path, "first")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_text() == "first"
    assert path.read_text() == "last" and os.listdir(tmp_path) == ["a.json"]


def test_what_a_killed_write_of_a_shared_file_left_is_removed_hours_later(tmp_path):
    old, new = tmp_path / ".a.json.0123abcd", tmp_path / ".a.json.4567cdef"
    for left in (old, new):
        left.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    write_whole(tmp_path / "a.json", "whole")
    assert sorted(os.listdir(tmp_path)) == [new.name, "a.json"]


def test_what_another_user_left_is_no_reason_not_to_write(tmp_path, monkeypatch):
    left, rmtree = tmp_path / ".a.json.0123abcd", shutil.rmtree
    left.mkdir()

    def refused(folder, ignore_errors=False):
        if folder == left:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        rmtree(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refused)
    with replacing(tmp_path / "a.json") as temporary:
        temporary.write_text("whole")
    assert sorted(os.listdir(tmp_path)) == [left.name, "a.json"]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_leaves_what_was_written_before(writer, tmp_path, monkeypatch):
    writer(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(OSError, match="No space left on device"):
            writer(tmp_path, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    writer(tmp_path, 2)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)


@pytest.mark.parametrize("writer", REPORTS.values(), ids=REPORTS)
def test_a_report_that_is_a_link_is_written_where_it_leads(writer, tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    writer(elsewhere, 1)
    folder.mkdir()
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    for name in before:
        (folder / name).symlink_to(elsewhere / name)
    writer(folder, 2)
    assert all((folder / name).is_symlink() and (elsewhere / name).read_bytes() != before[name] for name in before)
    assert set(os.listdir(elsewhere)) == set(os.listdir(folder)) == set(before)
