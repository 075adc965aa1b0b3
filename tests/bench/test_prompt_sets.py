"""The prompt sets of specheads bench: forms of files, categories, installed packages."""

import gzip
import json
from pathlib import Path

import pytest

from specheads.bench.compare.prompt_sets import default_sets, sets_from
from specheads.bench.prompts import PACKAGES, package_prompts, read_prompts
from specheads.data.conversation import Conversation


class Letters:
    """One token a character."""

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2 + 2?"], "reference": ["4"]},
]
HUMAN_EVAL = [
    {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "", "canonical_solution": ""}
]


@pytest.mark.parametrize("name", ["question.jsonl", "question.jsonl.gz"])
def test_files_of_spec_bench_mt_bench_and_speed_bench_have_turns_and_categories(tmp_path, name):
    path = tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in SPEC_BENCH).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    prompts = read_prompts(path)
    assert [prompt.category for prompt in prompts] == ["writing", "math"]
    questions = [{"role": "user", "content": text} for text in ("Compose a post.", "Rewrite it.")]
    assert prompts[0].asked == Conversation.from_messages(questions)


@pytest.mark.parametrize("name", ["q.JSONL", "Q.Jsonl.GZ", "q.ndjson", "63"])
def test_rows_of_json_are_no_prompts_whatever_the_file_is_called(tmp_path, name):
    path = tmp_path / name
    text = "\n".join(["", *map(json.dumps, SPEC_BENCH)]).encode("utf-8-sig")
    path.write_bytes(gzip.compress(text) if name.endswith("GZ") else text)
    assert [prompt.category for prompt in read_prompts(path)] == ["writing", "math"]


def test_a_prompt_a_line_may_look_like_json_and_have_a_byte_order_mark(tmp_path):
    for name, first in (("a.txt", '{"turns": ["no"]}'), ("a", '"x" is'), ("b", "{ x"), ("c", "[1]")):
        (tmp_path / name).write_text(f"{first}\ntwo\n", "utf-8-sig")
        assert [prompt.asked for prompt in read_prompts(tmp_path / name)] == [first, "two"]


@pytest.mark.parametrize("column", ["prompt", "question", "problem", "text"])
def test_questions_are_found_under_the_names_of_published_files(tmp_path, column):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({column: "How many?", "answer": "#### 3"}) + "\n", "utf8")
    assert [prompt.asked for prompt in read_prompts(path)] == ["How many?"]
    assert [prompt.asked for prompt in read_prompts(path, chat=True)] == [Conversation.from_text("How many?")]


def test_files_of_humaneval_are_plain_prompts_and_bad_turns_are_named_by_their_line(tmp_path):
    path = tmp_path / "HumanEval.jsonl"
    path.write_text(json.dumps(HUMAN_EVAL[0]) + "\n", "utf8")
    (prompt,) = read_prompts(path)
    assert prompt.asked == "def f(x):\n" and prompt.category is None
    path.write_text('"a"\n{"turns": []}\n', "utf8")
    with pytest.raises(ValueError, match=r"line 2: turns=\[\]: expected a list of the user's questions"):
        read_prompts(path)


@pytest.mark.parametrize("damage", ["another file", "cut short", "overwritten", "other bytes"])
def test_a_file_that_gzip_did_not_write_whole_is_named(tmp_path, damage):
    path, whole = tmp_path / "x.jsonl.gz", gzip.compress(b'"a"\n')
    damaged = {"another file": b"no gzip", "cut short": whole[:-3], "overwritten": whole[:10] + b"\xff" * 9}
    path.write_bytes(damaged.get(damage, whole[:-8] + bytes(8)))
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz is no whole gzip file: "):
        read_prompts(path)


def test_a_file_is_a_set_of_the_categories_asked_for_evenly_spaced(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [{"prompt": f"{i} {c}", "category": c} for i in range(6) for c in ("a", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    (found,) = sets_from([path], Letters(), 3, ["b"])
    assert [Letters().decode(ids) for ids in found.ids] == ["0 b", "2 b", "4 b"] and found.categories == ["b"] * 3
    assert found.name == "q.jsonl" and found.longest(4) == 3 and len(sets_from([path], Letters(), None)[0].ids) == 12
    other = tmp_path / "other" / "q.jsonl"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    assert [one.name for one in sets_from([path, other], Letters(), 1)] == [str(path), str(other)]
    with pytest.raises(ValueError, match=r"unknown category in .* 'c'"):
        sets_from([path], Letters(), None, ["c"])


def test_third_party_prompts_are_shared_among_the_installed_packages():
    prompts, missing = package_prompts(Letters(), 7, 40, ("rich", "click", "no_such_package"))
    assert missing == ["no_such_package"] and len({prompt.asked for prompt in prompts}) == 7
    assert [prompt.category for prompt in prompts] == ["rich"] * 4 + ["click"] * 3
    import click

    sources = [path.read_text("utf8") for path in Path(click.__file__).parent.rglob("*.py")]
    assert all(any("\n" + prompt.asked in source for source in sources) for prompt in prompts[4:])
    with pytest.raises(ValueError, match=r"99999 prompts asked for, but only .*; not installed: no_such_package"):
        package_prompts(Letters(), 99999, 40, ("rich", "no_such_package"))


def test_the_default_sets_have_at_least_fifty_prompts_each_where_all_packages_are():
    sets = default_sets(Letters(), 64, 64)
    assert [len(one.ids) for one in sets] == [64, 64] and set(sets[1].categories) <= set(PACKAGES)
    assert {len(ids) for one in sets for ids in one.ids} == {64}


def test_categories_of_a_file_that_has_none_are_refused(tmp_path):
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"--categories: the prompts of .*lines.txt have none; leave it out"):
        sets_from([tmp_path / "lines.txt"], None, None, ["writing"])
