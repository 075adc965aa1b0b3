"""Claims about the forms in which rows come: ShareGPT's, Alpaca's, calls of tools, and tokens."""

from __future__ import annotations

import copy

import pytest

from specheads.data.conversation import Conversation
from specheads.data.datasets import tokenize
from specheads.data.row_forms import parse_messages
from tests.support.chat_tokenizer import CHAT, MARKED, UNMARKED, build_tokenizer, config, supervised

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


TWO_TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "very well"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "still well"},
]
SHARED = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "how are you"},
    {"from": "gpt", "value": "very well"},
    {"from": "user", "value": "and now"},
    {"from": "assistant", "value": "still well"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED},
        {"conversations": SHARED[1:], "system": "be brief"},
        {"conversations": TWO_TURNS},
        {"messages": SHARED},
        {"messages": [{**m, "role": {"user": "human"}.get(m["role"], m["role"].upper())} for m in TWO_TURNS]},
        {"conversations": SHARED, "messages": None, "text": "not this"},
        {
            "instruction": "and", "input": "now", "output": "still well", "system": "be brief",
            "history": [["how are you", "very well"]],
        },
    ],
    ids=lambda row: " ".join(row),
)  # fmt: skip
def test_a_row_of_sharegpt_or_alpaca_is_the_chat_it_writes(row, tokenizer):
    told = tokenize({"messages": TWO_TURNS}, tokenizer, config())
    made = tokenize(row, tokenizer, config())
    if "instruction" in row:  # instruction and input are lines of one message
        chat = [*TWO_TURNS[:3], {"role": "user", "content": "and\nnow"}, TWO_TURNS[4]]
        told = tokenize({"messages": chat}, tokenizer, config())
    assert made == told and supervised(made, tokenizer) == ["very well<|end|>", "still well<|end|>"]


def test_an_instruction_is_a_chat_beside_text_too_and_without_an_input_as_it_is(tokenizer):
    row = {"instruction": "add", "input": "", "output": "two"}
    chat = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "two"}]
    told = tokenize({"messages": chat}, tokenizer, config())
    assert tokenize(row, tokenizer, config()) == tokenize({**row, "text": "a b c"}, tokenizer, config()) == told
    by_name = tokenize(row, tokenizer, config(text_column="output"))
    assert by_name == tokenize({"text": "two"}, tokenizer, config())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"history": [["asked"]]}, r"history holds \['asked'\]: expected pairs of what was asked and answered"),
        ({"history": [None]}, "history holds None: expected pairs"),
        ({"history": [["asked", 3]]}, "holds 3: expected text"), ({"instruction": ["add"]}, "holds .*: expected text"),
        ({"input": 5}, "holds 5: expected text"),
    ],
    ids=str,
)  # fmt: skip
def test_an_instruction_that_is_no_text_is_refused(columns, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenize({"instruction": "add", "output": "two", **columns}, tokenizer, config())


def test_arguments_of_a_call_are_written_as_a_dict_whether_the_row_has_them_as_one_or_as_json(tokenizer):
    def row(arguments):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        chat = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": chat}

    own = copy.copy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% for call in m.tool_calls %}"
        "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    as_text = tokenize(row('{"at": 1}'), own, config())
    assert as_text == tokenize(row({"at": 1}), own, config())
    assert supervised(as_text, own) == ['{"at": 1}<|end|>']


TOKENS = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"loss_mask": [0, 0, 1, 1]}, [-100, -100, 7, 8]),
        ({"loss_mask": [True, True, False, True]}, [-100, 6, -100, 8]),
        ({"labels": [-100, -100, 7, 8], "loss_mask": [0, 0, 1, 1]}, [-100, -100, 7, 8]),
        ({"attention_mask": [1, 1, 1, 1], "position_ids": [0, 1, 2, 3], "document_ids": [2, 2, 2, 2]}, [-100, 6, 7, 8]),
    ],
    ids=str,
)
def test_a_tokenized_row_supervises_what_its_loss_mask_says(columns, labels, tokenizer):
    assert tokenize({**TOKENS, **columns}, tokenizer, config()) == {**TOKENS, "labels": labels}


def test_padding_of_a_tokenized_row_is_left_out(tokenizer):
    padded = {
        "input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, 5, 6, -100],
        "position_ids": [1, 0, 1, 1], "document_ids": [0, 1, 1, 0],
    }  # fmt: skip
    assert tokenize(padded, tokenizer, config()) == {"input_ids": [5, 6], "labels": [-100, 6]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss_mask": [1]}, "4 input_ids and 1 loss_mask: expected as many"),
        ({"labels": [-100, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, "labels and another loss_mask: leave one"),
        ({"document_ids": [1, 1, 2, 2]}, r"several documents, by its document_ids \[1, 1, 2, 2\]: give each as a row"),
        ({"position_ids": [0, 1, 0, 1]}, r"several documents, by its position_ids \[0, 1, 0, 1\]"),
    ],
    ids=str,
)
def test_a_tokenized_row_whose_columns_disagree_is_refused(columns, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenize({**TOKENS, **columns}, tokenizer, config())


PARTS = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TWO_TURNS]


def test_parts_of_text_are_learnt_and_asked_as_their_text(tokenizer):
    assert tokenize({"messages": PARTS}, tokenizer, config()) == tokenize({"messages": TWO_TURNS}, tokenizer, config())
    asked = [Conversation.from_messages(chat).prompt(["very well"], tokenizer) for chat in (PARTS, TWO_TURNS)]
    assert asked[0] == asked[1]
    two = [{"type": "text", "text": text} for text in ("how", "are you")]
    row = tokenize({"messages": [{"role": "user", "content": two}, *PARTS[2:]]}, tokenizer, config())
    assert tokenizer.decode(row["input_ids"]).startswith("<|user|>how\nare you<|assistant|>very well<|end|>")


def test_a_template_that_reads_parts_gets_them():
    template = MARKED.replace(
        "{{ m['content'] }}", "{% for p in m['content'] if p['type'] == 'text' %}[{{ p['text'] }}]{% endfor %}"
    )
    tokenizer = build_tokenizer(template)
    row = tokenize({"messages": PARTS}, tokenizer, config())
    assert supervised(row, tokenizer) == ["[very well]<|end|>", "[still well]<|end|>"]


@pytest.mark.parametrize("content", [[{"type": "image", "url": "a.png"}], ["a"], {"text": "a"}, 5], ids=str)
def test_content_that_is_no_text_is_refused_with_the_messages_number(content, tokenizer):
    messages = [TWO_TURNS[1], {"role": "assistant", "content": content}]
    reason = r"message 2: its content is .*: expected text, or a list of"
    for asked in ([TWO_TURNS[0], {"role": "user", "content": content}], messages):
        with pytest.raises(ValueError, match="the base reads text alone" if "image" in str(content) else reason):
            tokenize({"messages": asked}, tokenizer, config())
        with pytest.raises(ValueError, match="message 2: its content"):
            Conversation.from_messages(asked)


def test_a_call_in_sharegpt_is_a_call_of_the_assistant_and_its_result_a_tools():
    shared = [
        {"from": "human", "value": "2 + 2"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "four"},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert parse_messages(shared) == [
        {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "observation", "content": "4"}, {"role": "assistant", "content": "four"},
    ]  # fmt: skip
    assert parse_messages([{"from": "function_call", "value": "add(2)"}]) == [
        {"role": "assistant", "content": "add(2)"}
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([CHAT[1], {"role": "asistant", "content": "b"}], "message 2: unknown role 'asistant'; did you mean 'assis"),
        ([{"from": "humen", "value": "a"}], "message 1: unknown role 'humen'; did you mean 'human'"),
        ([{"role": None, "content": "a"}], "expected a dict with 'role' and 'content', or 'from' and 'value'"),
        ([{"from": "human"}], "expected a dict with 'from' and 'value'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_of_nobody_is_refused(messages, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenize({"messages": messages}, tokenizer, config())


def test_what_the_template_itself_refuses_is_one_line():
    strict = build_tokenizer("{{ raise_exception('roles must alternate') }}" + UNMARKED)
    for template in (strict, build_tokenizer("{{ raise_exception('roles must alternate') }}" + MARKED)):
        with pytest.raises(ValueError, match=r"the chat template refuses .*: roles must alternate"):
            tokenize({"messages": CHAT}, template, config())


def test_a_role_that_the_template_itself_asks_for_is_a_role():
    template = UNMARKED.replace("{% for", "{% if messages[0]['role'] == 'critic' %}{% endif %}{% for", 1)
    messages = [*TWO_TURNS[1:3], {"role": "critic", "content": "so so"}]
    assert tokenize({"messages": messages}, build_tokenizer(template), config())["input_ids"]
    with pytest.raises(ValueError, match="unknown role 'critic'"):
        tokenize({"messages": messages}, build_tokenizer(UNMARKED), config())


def test_a_tokenizer_without_a_template_is_named_with_what_to_do():
    bare = build_tokenizer()
    bare.chat_template, bare.name_or_path = None, "models/bare"
    with pytest.raises(ValueError, match=r"the tokenizer 'models/bare' has no chat template.*chat_template\.jinja"):
        tokenize({"messages": CHAT}, bare, config())
    with pytest.raises(ValueError, match="the tokenizer 'models/bare' has no chat template"):
        Conversation.from_messages(CHAT).prompt([""] * 0, bare)
