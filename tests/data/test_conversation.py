"""Claims about specheads/data/conversation.py: where a chat asks the assistant, and what precedes each answer."""

import pytest

from specheads.data.conversation import Conversation
from tests.support.chat_base import messages
from tests.support.chat_tokenizer import UNMARKED, build_tokenizer

CALL = {"role": "assistant", "content": "", "reasoning_content": "I must look", "tool_calls": [
    {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Ü"}'}}]}  # fmt: skip
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def asked(chat, answers, template=UNMARKED, **columns):
    """The text in front of each answer, where the earlier ones are `answers`."""
    tokenizer = build_tokenizer(template)
    conversation = Conversation.from_messages(chat, **columns)
    return [
        tokenizer.decode(conversation.prompt(answers[:turn], tokenizer), skip_special_tokens=False)
        for turn in range(conversation.num_turns)
    ]


def test_the_assistant_is_asked_after_each_user_and_its_answers_stay():
    chat = messages(("system", "s"), ("user", "1"), ("assistant", "OLD"), ("user", "2"), ("assistant", "OLD"))
    assert asked(chat, ["new"]) == [
        "<|system|>s<|user|>1<|assistant|>", "<|system|>s<|user|>1<|assistant|>new<|end|><|user|>2<|assistant|>",
    ]  # fmt: skip


def test_a_call_whose_results_follow_stays_with_them_and_the_assistant_is_asked_in_its_place_and_after_them():
    results = messages(("tool", "42"), ("tool", "43"))
    chat = [*messages(("user", "1")), CALL, *results, *messages(("assistant", "OLD"), ("user", "2"))]
    call = '<|assistant|>(I must look)look{"at": "Ü"}<|end|><|tool|>42<|tool|>43'
    assert asked(chat, ["own call", "own"], TEMPLATE, tools=[{"function": {"name": "look"}}]) == [
        "[look]<|user|>1<|assistant|>",
        f"[look]<|user|>1{call}<|assistant|>",
        f"[look]<|user|>1{call}<|assistant|>own<|end|><|user|>2<|assistant|>",
    ]


def test_calls_one_after_the_other_and_a_chat_that_ends_with_a_result():
    one, two = ({**CALL, "content": name, "reasoning_content": None, "tool_calls": None} for name in ("ONE", "TWO"))
    first, second = messages(("tool", "r1"), ("function", "r2"))
    before = ["<|user|>u", "<|user|>u<|assistant|>ONE<|end|><|tool|>r1"]
    before.append(f"{before[1]}<|assistant|>TWO<|end|><|function|>r2")
    assert asked([*messages(("user", "u")), one, first, two, second], ["x", "y"]) == [
        f"{text}<|assistant|>" for text in before
    ]


def test_several_messages_of_the_assistant_stay_together_in_front_of_a_result_only():
    chat = messages(("user", "1"), ("assistant", "A"), ("assistant", "B"), ("tool", "r"), ("assistant", "C"),
                    ("assistant", "D"), ("user", "2"))  # fmt: skip
    assert asked(chat, ["x", "y"])[2].replace("<|end|>", "") == (
        "<|user|>1<|assistant|>A<|assistant|>B<|tool|>r<|assistant|>y<|user|>2<|assistant|>"
    )


def test_variables_reach_the_template():
    conversation = Conversation.from_text("a").with_template({"enable_thinking": False})
    tokenizer = build_tokenizer(UNMARKED + "{% if enable_thinking is false %}no{% endif %}")
    assert tokenizer.decode(conversation.prompt((), tokenizer)) == "<|user|>a<|assistant|>no"


@pytest.mark.parametrize("content", ["", None])
def test_a_prompt_has_calls_as_the_template_takes_them(content):
    """DeepSeek's joins the arguments to text, and takes no null content."""
    template = TEMPLATE.replace(" | tojson", " + '.'").replace("{{ m.content }}", "{{ m.content + '' }}")
    chat = [*messages(("user", "1")), {**CALL, "content": content}, *messages(("tool", "42"))]
    assert (
        asked(chat, ["x"], template)[1]
        == '<|user|>1<|assistant|>(I must look)look{"at": "Ü"}.<|end|><|tool|>42<|assistant|>'
    )


def test_what_the_template_refuses_is_one_line():
    with pytest.raises(ValueError, match=r"the chat template refuses .*: can only concatenate"):
        asked(messages(("user", "1")), [], "{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (messages(("user", " u\n"), ("assistant", "another answer")), True),
        (messages(("user", "e\u0301")), False),
        (messages(("user", "U")), False),
        (messages(("user", "u"), ("user", "u")), False),
        (messages(("system", "s"), ("user", "u")), False),
        ([*messages(("user", "u")), CALL, *messages(("tool", "1"))], False),
    ],
)
def test_conversations_that_ask_the_same_have_one_key(other, same):
    assert (Conversation.from_messages(other).key == Conversation.from_messages(messages(("user", "u"))).key) == same


def test_keys_are_of_composed_characters_and_of_tools():
    composed, decomposed = (Conversation.from_messages(messages(("user", text))).key for text in ("\u00e9", "e\u0301"))
    assert composed == decomposed != Conversation.from_messages(messages(("user", "\u00e9")), [{"name": "f"}]).key
