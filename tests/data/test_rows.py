"""Claims about specheads/data/rows.py: what is supervised, and what survives cutting, packing and padding."""

from __future__ import annotations

import pytest
import torch
import transformers

from specheads.data.datasets import IGNORED, Collator, chunk, load_dataset_rows, pack, tokenize
from tests.support.chat_tokenizer import CHAT, CHATML, MARKED, THINKING, UNMARKED, build_tokenizer, config, supervised

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


# --- what is supervised ---


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


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_an_answer_of_weight_0_is_not_learnt(template):
    tokenizer = build_tokenizer(template)
    for weight, learnt in ((0, ["still well<|end|>"]), (1, ["very well<|end|>", "still well<|end|>"])):
        row = tokenize({"messages": [*CHAT[:2], {**CHAT[2], "weight": weight}, *CHAT[3:]]}, tokenizer, config())
        assert supervised(row, tokenizer) == learnt
        assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    with pytest.raises(ValueError, match=r"weight=0\.5: expected 0 or 1"):
        tokenize({"messages": [*CHAT[:4], {**CHAT[4], "weight": 0.5}]}, tokenizer, config())
    opened = [{**CHAT[2], "weight": 0}, *CHAT[1:]]
    assert supervised(tokenize({"messages": opened}, tokenizer, config()), tokenizer) == learnt


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "text=None"),
        ({"messages": "hello"}, "expected a list"),
        ({"messages": []}, "expected a list"),
        ({"messages": [{"speaker": "human", "value": "x"}]}, "speaker"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
            "message 2, .*nothing",
        ),
        (
            {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}]},
            "message 1, .*nothing",
        ),
    ],
)
def test_malformed_rows_are_refused(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        tokenize(row, tokenizer, config())


# --- cutting and packing ---


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


# --- batching ---


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


def test_a_collator_takes_rows_that_are_padded_or_packed_already_for_what_they_are():
    kept = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    left = {"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, -100, 6, 7]}
    right = {"input_ids": [5, 6, 7, 0], "attention_mask": torch.tensor([1, 1, 1, 0]), "labels": [-100, 6, 7, -100]}
    batch = Collator(0)([kept, left, right])
    assert batch["document_ids"].tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["position_ids"][1].tolist() == [0, 0, 0, 1, 2]
    assert torch.equal(batch["attention_mask"], batch["document_ids"])
    packed = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "labels": [-100, 6, -100, 8]}
    assert Collator(0)([packed, kept])["document_ids"].tolist() == [[1, 1, 2, 2], [1, 1, 1, 0]]


def test_collator_refuses_no_pad_token():
    with pytest.raises(ValueError, match=r"pad_token_id=None.*eos_token_id"):
        Collator(None)  # type: ignore[arg-type]
