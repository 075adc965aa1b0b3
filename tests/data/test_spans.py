"""Claims about what is supervised: the assistant's words and its end of turn, in templates of every published shape."""

from __future__ import annotations

import re

import pytest

from specheads.data.batches import pack
from specheads.data.rows import IGNORED, tokenize, truncate
from specheads.data.spans import UncertainSpans
from tests.support.chat_shapes import CHATS, SHAPES
from tests.support.chat_tokenizer import CHAT, UNMARKED, build_tokenizer, config, supervised

LONG = 10_000


def labelled(text, shape, tokenizer):
    """The row that the pattern of the shape gives for a text."""
    emitted = [match.span(match.lastindex) for match in re.finditer(shape.emitted, text, re.DOTALL)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(start < b and end > a for a, b in emitted) else IGNORED
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return {"input_ids": encoded["input_ids"], "labels": [IGNORED, *labels[1:]]}


@pytest.mark.parametrize("name", SHAPES)
def test_the_assistants_tokens_and_no_others_are_supervised(name):
    shape = SHAPES[name]
    tokenizer, options = shape.tokenizer(), {"max_length": LONG, "chat_template_kwargs": shape.variables}
    stops = tokenizer.convert_tokens_to_ids([*shape.stops])
    rows = []
    for chat, messages in CHATS.items():
        row = tokenize({"messages": messages}, tokenizer, config(**options), stops)
        text = tokenizer.decode(row["input_ids"])
        assert row == labelled(text, shape, tokenizer), f"{chat}: {supervised(row, tokenizer)} of {text!r}"
        cut = tokenize({"messages": messages}, tokenizer, config(**{**options, "max_length": 12}), stops)
        assert cut == truncate(row, 12, tokenizer)
        assert cut["labels"].count(IGNORED) == max(
            cut["labels"].count(IGNORED), len(cut["labels"]) - len(row["labels"])
        )
        rows.append(row)
    packed = pack(rows, LONG)[0]
    assert packed["labels"] == [label for row in rows for label in row["labels"]]


@pytest.mark.parametrize("name", ["chatml", "eos once", "the next role ends a turn", "no generation prompt"])
def test_a_tokenizer_that_trims_its_offsets_moves_no_boundary(name):
    shape = SHAPES[name]
    stops = shape.tokenizer().convert_tokens_to_ids([*shape.stops])
    for chat, messages in CHATS.items():
        rows = [tokenize({"messages": messages}, shape.tokenizer(trim), config(max_length=LONG), stops)
                for trim in (False, True)]  # fmt: skip
        assert rows[0] == rows[1], chat


_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
_ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        (_TURNS + _ASKS).replace("in messages", "in messages | reverse"),
        _TURNS + _ASKS.replace("<|assistant|>", "<|bos|>Answer:"),
        (_TURNS + _ASKS).replace("in messages", "in messages[-2:]"),
        _TURNS.replace("<|{{", "{{ loop.revindex }}<|{{") + _ASKS,
        _TURNS.replace("{{ m.content }}", "{{ m.content | length }}:{{ m.content }}") + _ASKS,
        _TURNS.replace("<|end|>", "{% if not loop.last %}~{% endif %}<|end|>") + _ASKS,
    ],
    ids=["reversed", "asked otherwise", "the last two", "numbered from the end", "lengths", "no ~ at the end"],
)
def test_answers_that_cannot_be_told_for_certain_are_refused(template):
    with pytest.raises(UncertainSpans, match=r"for certain.*generation %\}"):
        tokenize({"messages": CHAT}, build_tokenizer(template), config())


def test_a_think_that_the_server_puts_into_the_prompt_is_prompt():
    template = UNMARKED.replace("<|assistant|>{{", "<|assistant|>{% if loop.last %}<think></think>{% endif %}{{")
    template = template.removesuffix("{% endif %}") + "{% if fast %}<think></think>{% endif %}{% endif %}"
    tokenizer = build_tokenizer(template)
    for variables, last in ((None, "<think></think>still well<|end|>"), ({"fast": True}, "still well<|end|>")):
        row = tokenize({"messages": CHAT}, tokenizer, config(chat_template_kwargs=variables))
        assert supervised(row, tokenizer) == ["very well<|end|>", last]


def test_a_call_is_written_as_the_template_takes_it():
    """Joined to text by DeepSeek's: an argument that is text stays as it is, one that is a dict becomes JSON."""
    shape = SHAPES["reasoning in the prompt alone"]
    tokenizer = shape.tokenizer()
    for arguments, content in (('{"a":  1}', ""), ('{"a":  1}', None), ({"a": 1}, "")):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        chat = [CHAT[1], {"role": "assistant", "content": content, "tool_calls": [call]}]
        written = arguments if isinstance(arguments, str) else '{"a": 1}'
        row = tokenize({"messages": chat}, tokenizer, config())
        assert supervised(row, tokenizer) == [f"<call>{written}<eos>"]
