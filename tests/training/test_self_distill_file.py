"""Claims about specheads/training/self_distill/rows_file.py: what is written, whenever the run is killed."""

import errno
import json
from itertools import count
from pathlib import Path

import pytest

from specheads.training.self_distill import rows_file
from specheads.training.self_distill.questions import Ask, Stream, TextPrompt
from specheads.training.self_distill.rows_file import SAME, RowsFile

TURNS = (2, 1, 3, 1, 2, 1, 1, 2)


class Question(TextPrompt):
    """Asked several times over."""

    def __init__(self, num_turns):
        self.__dict__["num_turns"] = num_turns


def answer(number):
    """Of the answers the 4th, 8th, … are the same line, and the 6th, 13th, … are none."""
    if number % 7 == 5:
        return f"no answer {number}"
    value = 0 if number % 4 == 3 else number
    return {"input_ids": [value], "labels": [-100]}


def fill(path, wanted=12, cycle=100, num_asks=40):
    """Everything that is still to be asked, as run() does: the file, and how many questions that were."""
    asks = (Ask(Question(TURNS[i % len(TURNS)]), 0.0) for i in (count() if num_asks is None else range(num_asks)))
    file = RowsFile(path, Stream(asks, wanted, cycle))
    rest, asked = file.resume(), 0
    while not file.finished and (ask := next(rest, None)):
        file.add(ask, [answer(file.answers + turn) for turn in range(ask.num_turns)])
        asked += 1
    return file, asked


def left_out(path):
    return path.with_name(path.name + ".left_out")


@pytest.mark.parametrize(
    ("options", "step"),
    [({"wanted": 8}, 1), ({"wanted": 20}, 7), ({"wanted": 99, "num_asks": 7}, 7)],
)
@pytest.mark.sampled(3)
def test_a_run_that_is_killed_after_any_byte_resumes_to_the_same_two_files(options, step, tmp_path, monkeypatch):
    written = []
    append = rows_file._append
    monkeypatch.setattr(
        rows_file, "_append", lambda path, content: (written.append((path, content)), append(path, content))
    )
    whole = tmp_path / "whole.jsonl"
    fill(whole, **options)
    monkeypatch.setattr(rows_file, "_append", append)
    numbers = [json.loads(line)["input_ids"][0] for line in whole.read_text().splitlines()]
    assert numbers == list(dict.fromkeys(0 if n % 4 == 3 else n for n in range(99) if n % 7 != 5))[: len(numbers)]
    assert left_out(whole).exists() and len(written) > 3
    path, operations = tmp_path / "cut.jsonl", [(p == whole, content) for p, content in written]
    done = [b"", b""]
    for is_main, content in operations:
        for stop in range(0, len(content), step):
            state = list(done)
            state[is_main] += content[:stop]
            for target, held in ((left_out(path), state[0]), (path, state[1])):
                target.write_bytes(held)
            fill(path, **options)
            assert path.read_bytes() == whole.read_bytes(), (is_main, stop)
            assert left_out(path).read_bytes() == left_out(whole).read_bytes()
        done[is_main] += content
    _, asked = fill(path, **options)
    assert asked == 0 and path.read_bytes() == whole.read_bytes(), "a finished file stays as it is"


def test_a_file_may_be_made_longer_and_a_longer_one_is_left_alone(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    fill(whole, wanted=25)
    for wanted in (4, 5, 11, 25):
        fill(path, wanted=wanted)
        assert path.read_bytes() == b"".join(whole.read_bytes().splitlines(keepends=True)[:wanted])
    path.write_bytes(path.read_bytes() + b'{"input')
    before = left_out(path).read_bytes()
    file, asked = fill(path, wanted=7)
    assert asked == 0 and file.lines == 25
    assert path.read_bytes() == whole.read_bytes() and left_out(path).read_bytes() == before


def test_a_full_disk_loses_no_record_of_what_is_left_out(tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    for each in (whole, path):
        fill(each)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    before = left_out(path).read_bytes()
    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device"):
            fill(path)
    names = {f"{each.name}{suffix}" for each in (whole, path) for suffix in ("", ".left_out")}
    assert left_out(path).read_bytes() == before and {each.name for each in tmp_path.iterdir()} == names
    fill(path)
    assert path.read_bytes() == whole.read_bytes() and left_out(path).read_bytes() == left_out(whole).read_bytes()


def test_nothing_new_in_a_whole_cycle_ends_the_run_and_the_next_one_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.answer", lambda number: {"input_ids": [min(number, 4)], "labels": [-100]})
    path = tmp_path / "own.jsonl"
    file, asked = fill(path, wanted=50, cycle=6, num_asks=None)
    assert file.lines == 5 and asked == 3 + 6, "the third question brings the last new line"
    assert file.left_out == {SAME: file.answers - 5}
    assert "5 lines of the 50 asked for" in file.summary()
    again, asked = fill(path, wanted=50, cycle=6, num_asks=None)
    assert asked == 0 and again.summary() == file.summary()


def test_the_summary_counts_what_is_left_out(tmp_path):
    file, _ = fill(tmp_path / "own.jsonl", wanted=12)
    records = [json.loads(line) for line in left_out(file.path).read_text().splitlines()]
    same = [record["answer"] for record in records if record["why"] == SAME]
    others = [record["answer"] for record in records if record["why"] != SAME]
    assert all(number % 4 == 3 for number in same) and all(number % 7 == 5 for number in others)
    assert f"left out {len(same)} answers that were the same" in file.summary()
    assert f"left out {len(others)} answers (" in file.summary() and "no answer 5" in file.summary()


def test_a_folder_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "own").mkdir()
    with pytest.raises(ValueError, match="own' is a folder: give a file"):
        RowsFile(tmp_path / "own", Stream(iter(()), 1, 1)).require_same({})
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_answers_that_came_before_their_turn_are_not_asked_for_again(tmp_path):
    path, ahead = tmp_path / "own.jsonl", tmp_path / "own.jsonl.ahead"
    asks = [Ask(Question(num), 0.0) for num in (1, 2, 1, 1)]
    file = RowsFile(path, Stream(iter(asks), 99, 100))
    list_of = [*file.resume()]
    file.keep(1, [answer(1), answer(2)])
    file.keep(3, [answer(3)])
    file.add(list_of[0], [answer(0)])
    with ahead.open("ab") as cut:
        cut.write(b'{"answer": 4, "resul')  # killed here
    again = RowsFile(path, Stream(iter(asks), 99, 100))
    rest = again.resume()
    assert again.answers == 1 and again.take_kept(1) == [answer(1), answer(2)] and again.take_kept(4) is None
    again.add(next(rest), [answer(1), answer(2)])
    third = RowsFile(path, Stream(iter(asks), 99, 100))
    assert third.take_kept(1) is None and [*third.resume()] == asks[2:]
    assert third.take_kept(1) is None and third.take_kept(3) == [answer(3)]
    assert [json.loads(line)["answer"] for line in ahead.read_text().splitlines()] == [3]
    third.discard_ahead()
    assert not ahead.exists()
