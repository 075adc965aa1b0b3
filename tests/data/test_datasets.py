"""Claims about specheads/data/datasets.py: what a source gives, what is held out or dropped, and what is refused."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch

from specheads.data import datasets
from specheads.data.config import DataConfig
from specheads.data.datasets import IGNORED, build_datasets, load_dataset_rows, token_counts
from tests.support.chat_tokenizer import CHAT, UNMARKED, build_tokenizer, config, supervised

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- sources ---


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    import datasets

    rows = [{"text": "one"}, {"text": "two"}]
    held = datasets.Dataset.from_list(rows)
    held.to_parquet(tmp_path / "rows.parquet")
    held.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": held}).save_to_disk(tmp_path / "splits")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.txt").write_text("two")
    lines = write_jsonl(tmp_path / "rows.jsonl", rows)
    sources = [lines, tmp_path / "rows.json", tmp_path / "rows.parquet", tmp_path / "saved", tmp_path / "splits"]
    sources += [str(tmp_path / "*.txt"), [tmp_path / "1.txt", tmp_path / "2.txt"], held, rows, iter(rows)]
    for source in sources:
        assert list(load_dataset_rows(source)) == rows, source


def test_a_text_file_is_one_row_under_the_column_asked_for(tmp_path):
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    rows = load_dataset_rows(tmp_path / "book.txt", text_column="body")
    assert list(rows) == [{"body": "one\n\ntwo\n"}]


def test_sources_that_cannot_be_read_say_why(tmp_path):
    import datasets

    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "broken.jsonl").write_text('{"text": "x\u2028y"}\n\n{"text": "y"\n{"text": "z"}\n')
    (tmp_path / "broken.json").write_text('[{"text": "x"},\n{"text": "y"]')
    (tmp_path / "words.jsonl").write_text('{"text": "x"}\n"b"\n')
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "a.txt").write_text("x")
    named = write_jsonl(tmp_path / "named.jsonl", [{"prompt": "x", "answer": "y"}])
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "x"}])}).save_to_disk(tmp_path / "splits")
    for source, error, message in [
        (tmp_path / "missing.jsonl", FileNotFoundError, r"no file .*missing\.jsonl"),
        (str(tmp_path / "x*.jsonl"), FileNotFoundError, r"no file .*x\*\.jsonl"),
        (tmp_path / "empty.jsonl", ValueError, "is empty"),
        (tmp_path / "none.json", ValueError, r"none\.json holds no rows"),
        (tmp_path / "broken.jsonl", ValueError, r"broken\.jsonl, line 3 is not JSON: Expecting ',' del"),
        (tmp_path / "broken.json", ValueError, r"broken\.json, line 2 is not JSON: "),
        (tmp_path / "words.jsonl", ValueError, r"words\.jsonl, line 2: 'b' is no object; expected {…} on each line"),
        (tmp_path / "blank.jsonl", ValueError, r"blank\.jsonl holds no rows"),
        ([], ValueError, "the list given holds no rows"),
        (tmp_path / "a.csv", ValueError, r"'\.csv' is unknown; expected one of \['\.json'"),
        ([named, tmp_path / "a.txt"], ValueError, "several kinds"),
        (named, ValueError, r"columns \['prompt', 'answer'\]: expected 'text' \(text\) or 'messages'"),
        (tmp_path, ValueError, "expected what save_to_disk wrote"),
        (["x", 3], ValueError, "expected a dict"),
        (3, ValueError, "cannot read rows from the int"),
    ]:
        with pytest.raises(error, match=message):
            load_dataset_rows(source)
    with pytest.raises(ValueError, match=r"splits \['train'\]: no split 'test'"):
        load_dataset_rows(tmp_path / "splits", "test")


def test_a_file_that_is_not_there_is_told_with_the_nearest_that_is(tmp_path):
    named = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(FileNotFoundError, match=r"no file '.*/row\.jsonl' \(did you mean .*/rows\.jsonl\?\)"):
        load_dataset_rows(str(named).replace("rows", "row"))


@pytest.mark.parametrize("options", [{}, {"max_samples": 6}, {"eval_fraction": 0.4}, {"num_proc": 2}])
def test_broken_rows_of_a_dump_are_dropped_and_counted_by_reason(options, tokenizer, tmp_path, caplog):
    """With the number in the file of the first of each kind."""
    good, strict = (
        {"from": "human", "value": "a"},
        "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}",
    )
    rows = [{"conversations": [good, {"from": "gpt", "value": f"b {n}"}]} for n in range(12)]
    rows[3]["conversations"] = []
    rows[5]["conversations"] = [good, {"from": "gpt", "value": None}]
    rows[7]["conversations"] = [{"from": "hooman", "value": "a"}]
    rows[8]["conversations"] = [{"from": "human", "value": "no"}, {"from": "gpt", "value": "b"}]
    rows[10]["conversations"] = [good]
    source = str(write_jsonl(tmp_path / "dump.jsonl", rows))
    with caplog.at_level(logging.WARNING, logger="specheads.data.datasets"):
        sides = build_datasets(config(train=source, **options), build_tokenizer(strict + UNMARKED))
    kept = sum(len(side) for side in sides if side is not None)
    told = [record.getMessage() for record in caplog.records]
    if not options or "num_proc" in options:
        assert kept == 7
        assert told == [
            f"train ({source}): dropped 5 of 12 rows: "
            "3 malformed (the first is row 4: messages=[]: expected a list of {'role': …, 'content': …}); "
            "1 refused by the chat template (the first is row 9: "
            "the chat template refuses {'role': 'user', 'content': 'no'}, …: no); "
            "1 without a token to learn from (the first is row 11: "
            "expected text, or assistant turns inside max_length=2048)"
        ]
    assert kept + sum(int(re.search(r"dropped (\d+) of", line)[1]) for line in told) == options.get("max_samples", 12)
    numbers = {int(number) for line in told for number in re.findall(r"is row (\d+)", line)}
    assert numbers and numbers <= {4, 6, 8, 9, 11}
    assert sides[0].column_names == ["input_ids", "labels"]


def test_a_dataset_of_broken_rows_alone_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"none of the 2 rows of train can be learnt from: 2 malformed .* row 1: mess"):
        build_datasets(config(train=[{"messages": []}] * 2), tokenizer)


def test_a_tokenizer_without_a_template_is_an_error_and_drops_no_row(tokenizer):
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        build_datasets(config(train=[{"text": "a b"}, {"messages": CHAT}]), bare)


ROWS = {"text": '{"text": "plain words"}', "ids": '{"input_ids": [5, 6, 7]}'}
MALFORMED = {
    "not UTF-8": ("text", b'{"text": "caf\xe9"}', "{file}, line 2: byte 0xe9 at column 14 is not UTF-8; save the file"),
    "unknown id": (
        "ids",
        b'{"input_ids": [1, 97]}',
        "row 2 of {file}: token 97 is outside the base's vocabulary of 97",
    ),
    "negative id": ("ids", b'{"input_ids": [1, -2]}', "row 2 of {file}: token -2 is outside"),
    "half an id": ("ids", b'{"input_ids": [1, 2.5]}', "expected whole numbers"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_row_is_one_line_that_names_it(fault, tokenizer, tmp_path):
    kind, bad, message = MALFORMED[fault]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([ROWS[kind].encode(), bad, ROWS[kind].encode(), b""]))
    for source in (str(file), [str(file)]):
        with pytest.raises(ValueError, match=re.escape(message.format(file=file))) as caught:
            build_datasets(config(train=source), tokenizer, 97 if kind == "ids" else None)
        assert "\n" not in str(caught.value)
    file.write_bytes(b"\n".join([ROWS[kind].encode()] * 2))
    assert len(build_datasets(config(train=str(file)), tokenizer, 97 if kind == "ids" else None)[0]) == 2


def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"a\.txt, line 2: byte 0xe9 at column 4 is not UTF-8"):
        build_datasets(config(train=str(tmp_path / "*.txt")), tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_base_is_refused(tokenizer):
    rows = [{"text": "plain words"}]
    with pytest.raises(ValueError, match=r"row 1 of train: token \d+ is outside the base's vocabulary of 3"):
        build_datasets(config(train=rows), tokenizer, 3)


def test_sharegpt_and_alpaca_files_train_as_the_same_chats_do(tokenizer, tmp_path):
    chats = [[("add", "two"), ("and now", "three")], [("sub", "one")]]
    shared = [
        {"id": str(n), "conversations": [{"from": who, "value": text} for pair in chat
         for who, text in zip(("human", "gpt"), pair, strict=True)]} for n, chat in enumerate(chats)
    ]  # fmt: skip
    alpaca = [
        {"instruction": chat[-1][0], "input": "", "output": chat[-1][1], "history": [list(p) for p in chat[:-1]]}
        for chat in chats
    ]
    openai = [
        {"messages": [{"role": who, "content": text} for pair in chat
         for who, text in zip(("user", "assistant"), pair, strict=True)]} for chat in chats
    ]  # fmt: skip
    told, read = (
        [list(build_datasets(config(train=str(write_jsonl(tmp_path / f"{name}.jsonl", rows))), tokenizer)[0])
         for name, rows in group.items()]
        for group in ({"openai": openai}, {"shared": shared, "alpaca": alpaca})
    )  # fmt: skip
    assert read == told * 2 and len(told[0]) == 2


# --- datasets ---


def test_rows_that_other_code_made_are_made_again(tokenizer, tmp_path, monkeypatch):
    """datasets keeps what a function made by the function's name."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b c"}]))
    (before,) = build_datasets(config(train=path), tokenizer)[0]["input_ids"]
    monkeypatch.setattr(datasets, "tokenize", lambda *args: {"input_ids": [5, 6], "labels": [-100, 6]})
    assert build_datasets(config(train=path), tokenizer)[0]["input_ids"] == [before]
    monkeypatch.setattr(datasets, "_code", lambda: "other")
    assert build_datasets(config(train=path), tokenizer)[0]["input_ids"] == [[5, 6]]


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, logger="specheads.data.datasets"):
        train, _ = build_datasets(config(train=[{"messages": CHAT}, {"messages": CHAT[:2]}]), tokenizer)
    assert len(train) == 1
    assert "train: dropped 1 of 2 rows" in caplog.text
    with pytest.raises(ValueError, match="none of the 1 rows of train"):
        build_datasets(config(train=[{"messages": CHAT[:2]}]), tokenizer)


def test_the_same_seed_gives_the_same_rows_on_any_number_of_processes(tokenizer, tmp_path):
    rows = [{"text": f"{n} plain text " * (n % 5 + 1)} for n in range(30)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    base = {"train": source, "max_length": 32, "packing": True, "max_samples": 20, "eval_fraction": 0.2}
    one, two = (build_datasets(config(**base, num_proc=n), tokenizer) for n in (None, 2))
    for a, b in zip(one, two, strict=True):
        assert list(a) == list(b)
    assert {"input_ids", "labels", "document_ids", "position_ids"} == set(one[0].column_names)
    assert sum(max(sequence["document_ids"]) for sequence in one[0]) == 16, "20 samples, 4 held out"
    assert len(one[0]) < 16
    other = build_datasets(config(**base, seed=1), tokenizer)
    assert list(other[0]) != list(one[0])


def test_a_held_out_row_is_never_trained_on_in_part(tokenizer):
    rows = [{"text": f"{n:02d} " * 40} for n in range(10)]
    train, held_out = build_datasets(config(train=rows, eval_fraction=0.3, max_length=16), tokenizer)
    numbers = [{tokenizer.decode(row["input_ids"]).split()[1] for row in side} for side in (train, held_out)]
    assert not numbers[0] & numbers[1]
    assert len(numbers[1]) == 3 and len(numbers[0]) == 7
    _, other = build_datasets(config(train=rows, eval_fraction=0.3, max_length=16, seed=1), tokenizer)
    assert {tokenizer.decode(row["input_ids"]).split()[1] for row in other} != numbers[1]
    with pytest.raises(ValueError, match="of 1 rows leaves none to train on"):
        build_datasets(config(train=rows[:1], eval_fraction=0.3), tokenizer)


def test_eval_is_read_from_its_own_source_and_split(tokenizer):
    import datasets

    _, held_out = build_datasets(config(train=[{"text": "one"}], eval=[{"messages": CHAT}]), tokenizer)
    assert supervised(held_out[0], tokenizer) == ["very well<|end|>", "still well<|end|>"]
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")})
    sides = build_datasets(config(train=splits, eval=splits), tokenizer)
    assert [tokenizer.decode(side[0]["input_ids"]) for side in sides] == ["train<|end|>", "test<|end|>"]


def test_token_counts_are_of_supervised_tokens(tokenizer):
    train, _ = build_datasets(config(train=[{"messages": CHAT}] * 3), tokenizer)
    counts = token_counts(train, len(tokenizer))
    assert counts.dtype == torch.int64 and counts.shape == (len(tokenizer),)
    assert counts[tokenizer.eos_token_id] == 6
    assert counts[tokenizer.convert_tokens_to_ids("<|user|>")] == 0
    assert counts.sum() == sum(label != IGNORED for row in train for label in row["labels"])
    with pytest.raises(ValueError, match="vocab_size=3"):
        token_counts(train, 3)
    assert token_counts([{"labels": [IGNORED, 1]}] * 2001, 3).tolist() == [0, 2001, 0]


# --- options ---


def test_an_unknown_option_names_the_nearest_one():
    with pytest.raises(ValueError, match="unknown data option 'max_lenght'; did you mean 'max_length'"):
        DataConfig.from_dict({"train": "x", "max_lenght": 3})
    with pytest.raises(ValueError, match="unknown data option 'zzz'; known: train, "):
        DataConfig.from_dict({"train": "x", "zzz": 3})
    with pytest.raises(ValueError, match="'train' is missing"):
        DataConfig.from_dict({})
    assert DataConfig.from_dict({"train": "x", "packing": True}) == DataConfig("x", packing=True)


@pytest.mark.parametrize(
    "options",
    [
        {"train": ""},
        {"train": []},
        {"max_length": 1},
        {"max_length": 2.5},
        {"num_proc": 0},
        {"max_samples": 0},
        {"seed": -1},
        {"packing": "yes"},
        {"eval_fraction": 1.0},
        {"eval_fraction": 0.1, "eval": "x"},
        {"text_column": "messages"},
        {"chat_template_kwargs": "enable_thinking"},
        {"chat_template_kwargs": {1: 2}},
        {"chat_template_kwargs": {"tools": []}},
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(options):
    with pytest.raises(ValueError, match="|".join(options)):
        config(**options)
