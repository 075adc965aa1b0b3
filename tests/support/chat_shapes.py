"""Chat templates in the shapes of published families, written anew, each with a pattern of what the assistant emits in
the text; and chats of every kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.chat_tokenizer import build_tokenizer


@dataclass(frozen=True)
class Shape:
    """emitted: a pattern on the text that the template writes; its group is what the assistant emits."""

    template: str
    emitted: str
    specials: tuple[str, ...]
    eos: str
    variables: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    def tokenizer(self, trim_offsets: bool = False):
        tokenizer = build_tokenizer(self.template, trim_offsets)
        tokenizer.add_special_tokens({"extra_special_tokens": [*self.specials, self.eos]})
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.eos_token = self.eos
        return tokenizer


_CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
_EACH, _END = "{% for m in messages %}", "{% endfor %}"
_REASONING = (  # as a field, or in the content
    "{% set r = m.reasoning_content or '' %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}{% set c = c.split('</think>')[-1].lstrip() %}"
    "{% endif %}"
)
_LAST_USER = (
    "{% set ns = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
)


def _asks(text: str) -> str:
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


_IM = ("<|im_start|>", "<|im_end|>")
_CHATML = _EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n" + _END
_QWEN3 = (
    _LAST_USER + _EACH + _REASONING + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.user "
    "and (loop.last or r) %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}" + _CALLS + "<|im_end|>\n" + _END
)  # fmt: skip
_NEMOTRON = (
    _LAST_USER + _EACH + _REASONING + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.user and r %}<think>\n{{ r }}\n</think>\n{% else %}<think></think>{% endif %}{% endif %}"
    "{{ c | trim }}" + _CALLS + "<|im_end|>\n" + _END
)  # fmt: skip
_NO_THINK = "{% if enable_thinking is false %}"
_GLM = (
    "[gMASK]<sop>" + _LAST_USER + _EACH + _REASONING + "{% if m.role == 'assistant' %}<|assistant|>\n<think>"
    "{% if loop.index0 > ns.user %}{{ r }}{% endif %}</think>{% if c.strip() %}{{ '\\n' + c.strip() }}"
    "{% endif %}" + _CALLS + "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
    "<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    + _END
)  # fmt: skip
_GLM_SPECIALS = ("[gMASK]", "<sop>", "<|assistant|>", "<|user|>", "<|system|>", "<|observation|>")
_GLM_ASKS = _asks("<|assistant|>" + _NO_THINK + "{{ '\\n' }}<think></think>{% endif %}")
_GLM_STOPS = ("<|user|>", "<|observation|>")
_LLAMA3 = (
    "<|bos|>" + _EACH + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}" + _CALLS
    + "<|eot_id|>" + _END + _asks("<|start_header_id|>assistant<|end_header_id|>\n\n")
)  # fmt: skip
_LLAMA3_SPECIALS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_LLAMA3_EMITTED = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"
_CHATML_EMITTED = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"

SHAPES = {
    "chatml": Shape(_CHATML + _asks("<|im_start|>assistant\n"), _CHATML_EMITTED, _IM, "<|im_end|>"),
    "chatml, eos at the end of texts": Shape(
        _CHATML + _asks("<|im_start|>assistant\n"), _CHATML_EMITTED, _IM, "<|endoftext|>"
    ),
    "counts its messages": Shape(
        "{{ messages | length }}" + _CHATML + _asks("<|im_start|>assistant\n"), _CHATML_EMITTED, _IM, "<|im_end|>"
    ),
    "drops earlier reasoning": Shape(
        _QWEN3 + _asks("<|im_start|>assistant\n"), _CHATML_EMITTED, _IM, "<|im_end|>"
    ),
    "drops earlier reasoning, none asked for": Shape(
        _QWEN3 + _asks("<|im_start|>assistant\n" + _NO_THINK + "<think>\n\n</think>\n\n{% endif %}"),
        r"<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?(.*?<\|im_end\|>)", _IM, "<|im_end|>",
        {"enable_thinking": False},
    ),
    "asks for reasoning, drops it": Shape(
        _QWEN3 + _asks("<|im_start|>assistant\n<think>\n"),
        r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)", _IM, "<|im_end|>",
    ),
    "an empty think in place of dropped reasoning": Shape(
        _NEMOTRON + _asks("<|im_start|>assistant\n<think>\n"),
        r"<\|im_start\|>assistant\n(?:<think>\n?)(.*?<\|im_end\|>)", _IM, "<|im_end|>",
    ),
    "an empty think, none asked for": Shape(
        _NEMOTRON + _asks("<|im_start|>assistant\n" + _NO_THINK + "<think></think>{% else %}<think>\n{% endif %}"),
        r"<\|im_start\|>assistant\n(?:<think></think>|<think>)(.*?<\|im_end\|>)", _IM, "<|im_end|>",
        {"enable_thinking": False},
    ),
    "reasoning in the prompt alone": Shape(
        "<|bos|>" + _EACH + "{% if m.role == 'assistant' %}<|A|>{{ m.content.split('</think>')[-1] }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments }}{% endfor %}{{ eos_token }}{% else %}"
        "<|U|>{{ m.content }}{% endif %}" + _END + _asks("<|A|><think>\n"),
        r"<\|A\|>(.*?<eos>)", ("<|U|>", "<|A|>"), "<eos>",
    ),
    "eos once": Shape(
        _EACH + "<|{{ m.role }}|>\n{{ m.content }}<|stop|>\n" + _END
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        r"<\|assistant\|>\n(.*?<\|stop\|>)", ("<|stop|>",), "<eos>",
    ),
    "another end for the last turn": Shape(
        _EACH + "{% if m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
        "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|stop|>"
        "{% endif %}{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}" + _CALLS + "{% if "
        "loop.last and not add_generation_prompt %}<|return|>{% else %}<|stop|>{% endif %}{% else %}<|start|>"
        "{{ m.role }}<|message|>{{ m.content }}<|stop|>{% endif %}" + _END + _asks("<|start|>assistant"),
        r"(?<=<\|start\|>assistant)((?:<\|channel\|>analysis<\|message\|>[^<]*<\|stop\|><\|start\|>assistant)?"
        r"<\|channel\|>final.*?(?:<\|stop\|>|<\|return\|>))",
        ("<|start|>", "<|stop|>", "<|return|>", "<|channel|>", "<|message|>"), "<|return|>",
    ),
    "the next role ends a turn": Shape(
        _GLM + _GLM_ASKS, r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>|(?=<\|assistant\|>)|\Z))",
        _GLM_SPECIALS, "<eos>", stops=_GLM_STOPS,
    ),
    "the next role ends a turn, no reasoning asked for": Shape(
        _GLM + _GLM_ASKS, r"<\|assistant\|>(?:\n<think>(?:</think>)?)(.*?(?:<\|user\|>|<\|observation\|>|"
        r"(?=<\|assistant\|>)|\Z))", _GLM_SPECIALS, "<eos>", {"enable_thinking": False}, _GLM_STOPS,
    ),
    "the next role follows, not known to end a turn": Shape(
        _GLM + _GLM_ASKS, r"<\|assistant\|>(.*?)(?=<\|user\|>|<\|observation\|>|<\|assistant\|>|\Z)",
        _GLM_SPECIALS, "<eos>",
    ),
    "trimmed, another role name": Shape(
        "<|bos|>" + _EACH + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        + _CALLS + "<end_of_turn>\n" + _END + _asks("<start_of_turn>model\n"),
        r"<start_of_turn>model\n(.*?<end_of_turn>)", ("<start_of_turn>", "<end_of_turn>"), "<eos>",
    ),
    "headers": Shape(_LLAMA3, _LLAMA3_EMITTED, _LLAMA3_SPECIALS, "<|eot_id|>"),
    "headers, eos at the end of texts": Shape(_LLAMA3, _LLAMA3_EMITTED, _LLAMA3_SPECIALS, "<|end_of_text|>"),
    "no generation prompt": Shape(
        "<|bos|>" + _EACH + "{% if m.role == 'assistant' %} {{ m.content }}" + _CALLS + "{{ eos_token }}{% else %}"
        "{% if m.role == 'system' %}{{ m.content }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}"
        "{% endif %}" + _END,
        r"\[/INST\](.*?</s>)|(?<=</s>)([^\[].*?</s>)", ("[INST]", "[/INST]"), "</s>",
    ),
    "system beside the last question": Shape(
        "<|bos|>" + _LAST_USER + _EACH + "{% if m.role == 'assistant' %} {{ m.content }}" + _CALLS + "{{ eos_token }}"
        "{% elif m.role != 'system' %}[INST]{% if loop.index0 == ns.user and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% endif %}" + _END,
        r"\[/INST\](.*?</s>)|(?<=</s>)([^\[].*?</s>)", ("[INST]", "[/INST]"), "</s>",
    ),
    "two ends in a row": Shape(
        _EACH + "<|turn|><|{{ m.role }}|>{% if m.role == 'assistant' %}<|response|>{{ m.content }}" + _CALLS
        + "<|/response|>{% else %}{{ m.content }}{% endif %}<|/turn|>" + _END
        + _asks("<|turn|><|assistant|><|response|>"),
        r"<\|response\|>(.*?<\|/turn\|>)", ("<|turn|>", "<|/turn|>", "<|response|>", "<|/response|>"), "<|/turn|>",
    ),
    "words for roles": Shape(
        _EACH + "{% if m.role == 'assistant' %} ASSISTANT: {{ m.content }}" + _CALLS + "{{ eos_token }}{% else %}"
        "{{ m.role | upper }}: {{ m.content }}{% endif %}" + _END + _asks(" ASSISTANT:"),
        r" ASSISTANT:(.*?</s>)", (), "</s>",
    ),
    "no end of turn, eos once": Shape(
        _EACH + "{{ m.role | upper }}: {{ m.content }}" + _CALLS + "{{ '\\n' }}" + _END
        + "{% if add_generation_prompt %}ASSISTANT:{% else %}{{ eos_token }}{% endif %}",
        r"ASSISTANT:(.*?\n(?:</s>|(?=[A-Z]+: )))", (), "</s>",
    ),
    "no end of turn": Shape(
        _EACH + "{{ m.role | upper }}: {{ m.content }}" + _CALLS + "{{ '\\n\\n' }}" + _END + _asks("ASSISTANT:"),
        r"ASSISTANT:(.*?\n\n(?=[A-Z]+: |\Z))", (), "</s>",
    ),
    "eos before the next question": Shape(
        _EACH + "{% if m.role == 'assistant' %}[A]{{ m.content }}" + _CALLS + "{% else %}{% if not loop.first %}"
        "{{ eos_token }}{% endif %}[Q]{{ m.content }}{% endif %}" + _END + _asks("[A]"),
        r"\[A\](.*?(?:</s>|(?=\[A\])|\Z))", ("[A]", "[Q]"), "</s>",
    ),
    "parts of content": Shape(
        _EACH + "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" + _CALLS
        + "<|im_end|>\n" + _END + _asks("<|im_start|>assistant\n"),
        _CHATML_EMITTED, _IM, "<|im_end|>",
    ),
}  # fmt: skip


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: Any, reasoning: str | None = None, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    more = {"tool_calls": [call]} if arguments else {}
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {}), **more}


_RESULT = {"role": "tool", "content": "2"}
_SYSTEM = {"role": "system", "content": "be short"}
CHATS = {
    "one turn": [_user("how are you"), _answer("very well")],
    "two turns": [_user("one"), _answer("first"), _user("SECRET QUESTION"), _answer("second")],
    "system": [_SYSTEM, _user("one"), _answer("first"), _user("two"), _answer("second")],
    "four turns": [m for n in "abcd" for m in (_user(f"ask {n}"), _answer(f"say {n}"))],
    "open end": [_user("one"), _answer("first"), _user("two")],
    "code": [_user("write"), _answer("if a < b and c > d:\n    print('<x>')"), _user("more"), _answer("x < y\n[1, 2")],
    "white space": [_user("  one\n"), _answer("x  first  y"), _user("two "), _answer("second")],
    "unicode": [_user("你好 👩‍👩‍👧"), _answer("你好 👍🏽"), _user("é"), _answer("はい。")],
    "tags": [_user("say <b>"), _answer("<b>bold</b>"), _user("again"), _answer("<thought>")],
    "the same words": [_user("same"), _answer("same"), _user("same"), _answer("same")],
    "one letter": [_user("y?"), _answer("y"), _user("n?"), _answer("n")],
    "parts": [_user("one"), {**_answer(""), "content": [{"type": "text", "text": "first"}]}, _user("two")],
    "reasoning": [_user("one"), _answer("first", "so it is")],
    "reasoning twice": [_user("one"), _answer("first", "so it is"), _user("two"), _answer("second", "so too")],
    "reasoning in the content": [
        _user("one"), _answer("<think>\nso\n</think>\n\nfirst"), _user("two"),
        _answer("<think>\nso\n</think>\n\nsecond"),
    ],
    "call": [_user("one"), _answer("", a=1), _RESULT, _answer("two"), _user("thanks"), _answer("welcome")],
    "call with reasoning": [
        _user("one"), _answer("", "must add", a=1), _RESULT, _answer("two", "so"), _user("thanks"), _answer("welcome"),
    ],
    "call without content": [_user("one"), _answer(None, a=1), _RESULT, _answer("two")],
    "two answers in a row": [_user("one"), _answer("first"), _answer("second"), _user("two"), _answer("third")],
}  # fmt: skip
