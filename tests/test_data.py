"""Claims about specheads/data.py: what is supervised, what survives cutting and packing, and what is refused."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch

from specheads.data import (
    IGNORED,
    Collator,
    DataConfig,
    build_datasets,
    chunk,
    load_dataset_rows,
    pack,
    token_counts,
    tokenize,
)

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like Qwen3: what precedes a turn's answer depends on whether another turn follows
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' and loop.last %}(think) {% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIALS = ["<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "very well"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "still well"},
]
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", MARKED)


def build_tokenizer(template: str = MARKED, trim_offsets: bool = False):
    """A byte-level BPE of 400 tokens; trim_offsets=True is how GPT-2 and Llama 3 report offsets."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([m["content"] for m in CHAT] * 3 + ["a plain text, and another one\n\n"] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=SPECIALS[3:],
        chat_template=template,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(autouse=True)
def cache_in_tmp(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def config(**options) -> DataConfig:
    return DataConfig(**{"train": "unused", **options})


def supervised(row, tokenizer) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = [[]]
    for label, token in zip(row["labels"], row["input_ids"], strict=True):
        assert label in (IGNORED, token), "a label is its own token or ignored"
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------------ what is supervised


@pytest.mark.parametrize("template", [MARKED, UNMARKED, CHATML, THINKING, MARKED.replace("<|end|>{% endg", "{% endg")])
def test_loss_is_on_assistant_tokens_only(template):
    if "{% endgeneration %}" in template and "<|end|>" not in template:  # marks that leave the end of turn outside
        template = template.replace("{% endgeneration %}", "{% endgeneration %}<|end|>")
    tokenizer = build_tokenizer(template)
    row = tokenize({"messages": CHAT}, tokenizer, config())
    last = "(think) still well<|end|>" if template == THINKING else "still well<|end|>"
    assert supervised(row, tokenizer) == ["very well<|end|>", last]
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == rendered


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_template_without_generation_marks_gives_the_same_mask(trim_offsets):
    marked, unmarked = build_tokenizer(MARKED, trim_offsets), build_tokenizer(UNMARKED, trim_offsets)
    tool = [{"role": "assistant", "content": "é\n"}, {"role": "tool", "content": "4"}]
    for messages in (CHAT, CHAT[1:], CHAT[:4], CHAT[:2] + tool + CHAT[2:], [*CHAT[:2], {**CHAT[2], "content": ""}]):
        row = tokenize({"messages": messages}, marked, config())
        assert any(label != IGNORED for label in row["labels"])
        assert tokenize({"messages": messages}, unmarked, config()) == row


@pytest.mark.parametrize("template", [MARKED, UNMARKED, MARKED.replace("<|end|>{% endgeneration %}", "")])
def test_white_space_at_the_edges_of_a_turn_moves_no_boundary(template):
    """transformers' own assistant mask fails here: it drops the later turns, or takes in the user's."""
    if "{% endgeneration %}" not in template and "{% generation %}" in template:
        template = template.replace("{{ m['content'] }}{% else", "{{ m['content'] }}{% endgeneration %}<|end|>{% else")
    messages = [dict(m, content=f"  {m['content']} \n") if m["role"] == "assistant" else m for m in CHAT]
    row = tokenize({"messages": messages}, tokenizer := build_tokenizer(template, trim_offsets=True), config())
    assert supervised(row, tokenizer) == ["  very well \n<|end|>", "  still well \n<|end|>"]


def test_a_turn_without_end_of_turn_ends_with_its_last_token():
    """Also where offsets leave out the turn's last white space, and where a token crosses into the template's text."""
    template = MARKED.replace("<|end|>", "")
    messages = [*CHAT[:2], {"role": "assistant", "content": "well  "}, CHAT[3]]
    row = tokenize({"messages": messages}, tokenizer := build_tokenizer(template, trim_offsets=True), config())
    assert supervised(row, tokenizer) == ["well  "]
    tokenizer = build_tokenizer(template.replace("{% endgeneration %}", "{% endgeneration %}ell"))
    messages = [*CHAT[:2], {"role": "assistant", "content": "very w"}, CHAT[3]]
    assert supervised(tokenize({"messages": messages}, tokenizer, config()), tokenizer) == ["very well"]


def test_the_first_token_is_never_supervised():
    row = tokenize({"messages": [CHAT[2]]}, tokenizer := build_tokenizer(MARKED.replace("<|assistant|>", "")), config())
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]
    assert len(supervised(row, tokenizer)) == 1


def test_a_tokenizer_without_offsets_gives_the_same_text():
    slow = transformers.ByT5Tokenizer()
    slow.chat_template = UNMARKED.replace("<|end|>", "</s>")
    row = tokenize({"messages": CHAT}, slow, config())
    assert supervised(row, slow) == ["very well</s>", "still well</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    counting = "{{ messages | length }}" + UNMARKED
    with pytest.raises(ValueError, match=r"message 2 differently .*generation %\}"):
        tokenize({"messages": CHAT}, build_tokenizer(counting), config())


def test_text_is_supervised_but_for_its_first_token_and_ends_with_eos(tokenizer):
    row = tokenize({"text": "a plain text"}, tokenizer, config())
    assert tokenizer.decode(row["input_ids"]) == "a plain text<|end|>"
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]
    again = tokenize({"text": "a plain text<|end|>"}, tokenizer, config())
    assert again == row, "eos is not doubled"


def test_fields_that_arrow_filled_with_none_do_not_reach_the_template(tokenizer, tmp_path):
    template = UNMARKED.replace("{{ m['content'] }}<|end|>", "{{ m['content'] }}{{ m.call | tojson }}<|end|>")
    rows = [
        {"messages": [CHAT[1], {"role": "assistant", "content": "a", "call": call}]} for call in ({"x": 1}, {"y": 2})
    ]
    loaded = load_dataset_rows(iter(rows))
    row = tokenize(loaded[0], build_tokenizer(template), config())
    assert supervised(row, tokenizer) == ['a{"x": 1}<|end|>']


def test_tools_reach_the_template():
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + UNMARKED
    tokenizer = build_tokenizer(template)
    for tools in ([{"name": "adder"}], '[{"name": "adder"}]'):
        row = tokenize({"messages": CHAT, "tools": tools}, tokenizer, config())
        assert tokenizer.decode(row["input_ids"]).startswith("adder<|system|>")
        assert supervised(row, tokenizer) == ["very well<|end|>", "still well<|end|>"]


# ---------------------------------------------------------------------------------------------- cutting and packing


@pytest.mark.parametrize("max_length", [4, 8, 16])
def test_truncation_keeps_the_supervised_end(tokenizer, max_length):
    messages = [*CHAT, {"role": "user", "content": "thank you very much, and now another one"}]
    whole = tokenize({"messages": messages}, tokenizer, config())
    row = tokenize({"messages": messages}, tokenizer, config(max_length=max_length))
    assert len(row["input_ids"]) == max_length
    end = max(t for t, label in enumerate(whole["labels"]) if label != IGNORED) + 1
    assert row["input_ids"] == whole["input_ids"][end - max_length : end]
    assert row["labels"] == [IGNORED, *whole["labels"][end - max_length + 1 : end]]
    assert "<|end|>" in supervised(row, tokenizer)[-1]


def test_a_cut_row_keeps_its_bos():
    tokenizer = build_tokenizer("<|bos|>" + MARKED)
    row = tokenize({"messages": CHAT}, tokenizer, config(max_length=9))
    whole = tokenize({"messages": CHAT}, tokenizer, config())
    assert row["input_ids"] == whole["input_ids"][:1] + whole["input_ids"][-8:]
    assert row["labels"][:2] == [IGNORED, IGNORED], "the token after the splice follows nothing it was written after"


@pytest.mark.parametrize("bos", [False, True])
def test_long_text_becomes_consecutive_chunks_and_loses_no_token(tokenizer, bos):
    first = [tokenizer.bos_token_id if bos else 50]
    for length in range(1, 40):
        ids = first + list(range(100, 99 + length))
        parts = chunk({"input_ids": ids, "labels": [IGNORED, *ids[1:]]}, 8, tokenizer)
        assert all(len(part["input_ids"]) <= 8 for part in parts)
        assert all(len(part["input_ids"]) >= bos + 2 for part in parts[1:]), "no part without a supervised token"
        assert all(part["labels"][0] == IGNORED for part in parts)
        joined = parts[0]["input_ids"] + [t for part in parts[1:] for t in part["input_ids"][bos:]]
        assert joined in (ids, ids[:-1]), "only a lone last token may go"
        for part in parts[1:]:
            assert part["labels"] == [IGNORED] * (bos + 1) + part["input_ids"][bos + 1 :]


def numbered_rows(lengths):
    """Row r holds tokens 100 * r + t, all supervised: the worst case for a leak."""
    rows = [[100 * (r + 1) + t for t in range(length)] for r, length in enumerate(lengths)]
    return [{"input_ids": ids, "labels": list(ids)} for ids in rows]


def test_packing_never_mixes_documents():
    rows = numbered_rows([5, 3, 8, 2, 6, 1, 4, 4, 7])
    sequences = pack(rows, 8)
    found = []
    for sequence in sequences:
        assert len(sequence["input_ids"]) <= 8
        assert len({len(column) for column in sequence.values()}) == 1
        documents = sequence["document_ids"]
        assert sorted(set(documents)) == list(range(1, max(documents) + 1))
        for t, document in enumerate(documents):
            starts = t == 0 or documents[t - 1] != document
            assert sequence["position_ids"][t] == (0 if starts else sequence["position_ids"][t - 1] + 1)
            assert sequence["labels"][t] == (IGNORED if starts else sequence["input_ids"][t])
        for document in range(1, max(documents) + 1):
            found.append([i for i, d in zip(sequence["input_ids"], documents, strict=True) if d == document])
    assert sorted(found) == sorted(row["input_ids"] for row in rows)
    assert rows == numbered_rows([5, 3, 8, 2, 6, 1, 4, 4, 7]), "the rows given are not changed"


def test_packing_fills_the_fullest_sequence_that_takes_the_row():
    assert [sequence["document_ids"] for sequence in pack(numbered_rows([5, 6, 2, 3]), 8)] == [
        [1, 1, 1, 1, 1, 2, 2, 2],
        [1, 1, 1, 1, 1, 1, 2, 2],
    ]
    assert len(pack(numbered_rows([7, 3, 5]), 8)) == 2


def test_packing_refuses_a_row_that_does_not_fit():
    with pytest.raises(ValueError, match="9 tokens does not fit max_length=8"):
        pack(numbered_rows([9]), 8)


# --------------------------------------------------------------------------------------------------------- batching


def test_collator_pads_on_the_right_to_the_longest():
    batch = Collator(pad_token_id=7, pad_to_multiple_of=4)(numbered_rows([5, 2]))
    assert all(value.dtype == torch.int64 and value.shape == (2, 8) for value in batch.values())
    assert batch["input_ids"].tolist()[1] == [200, 201, 7, 7, 7, 7, 7, 7]
    assert batch["labels"].tolist()[1] == [200, 201] + [IGNORED] * 6
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] * 2 + [0] * 6]
    assert batch["document_ids"].tolist() == batch["attention_mask"].tolist()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert Collator(7)(numbered_rows([5, 2]))["input_ids"].shape == (2, 5)


def test_collator_keeps_the_documents_of_packed_rows():
    batch = Collator(pad_token_id=7)(pack(numbered_rows([3, 2, 4]), 6))
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]


def test_collator_refuses_no_pad_token():
    with pytest.raises(ValueError, match=r"pad_token_id=None.*eos_token_id"):
        Collator(None)  # type: ignore[arg-type]


def test_token_counts_are_of_supervised_tokens(tokenizer):
    train, _ = build_datasets(config(train=[{"messages": CHAT}] * 3), tokenizer)
    counts = token_counts(train, len(tokenizer))
    assert counts.dtype == torch.int64 and counts.shape == (len(tokenizer),)
    assert counts[tokenizer.eos_token_id] == 6
    assert counts[tokenizer.convert_tokens_to_ids("<|user|>")] == 0
    assert counts.sum() == sum(label != IGNORED for row in train for label in row["labels"])
    with pytest.raises(ValueError, match="vocab_size=3"):
        token_counts(train, 3)


# --------------------------------------------------------------------------------------------------------- datasets


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
    (tmp_path / "broken.jsonl").write_text('{"text": "x"')
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "a.txt").write_text("x")
    named = write_jsonl(tmp_path / "named.jsonl", [{"prompt": "x", "answer": "y"}])
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "x"}])}).save_to_disk(tmp_path / "splits")
    for source, error, message in [
        (tmp_path / "missing.jsonl", FileNotFoundError, r"no file .*missing\.jsonl"),
        (str(tmp_path / "x*.jsonl"), FileNotFoundError, r"no file .*x\*\.jsonl"),
        (tmp_path / "empty.jsonl", ValueError, "is empty"),
        (tmp_path / "none.json", ValueError, r"none\.json holds no rows"),
        (tmp_path / "broken.jsonl", ValueError, r"broken\.jsonl holds no rows that read as json: JSON parse error"),
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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "text=None"),
        ({"messages": "hello"}, "expected a list"),
        ({"messages": []}, "expected a list"),
        ({"messages": [{"from": "human", "value": "x"}]}, "expected a dict with 'role' and 'content'"),
    ],
)
def test_malformed_rows_are_refused(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        tokenize(row, tokenizer, config())


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, logger="specheads.data"):
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


# ---------------------------------------------------------------------------------------------------------- options


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
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(options):
    with pytest.raises(ValueError, match="|".join(options)):
        config(**options)
