"""Turns one row of text or chat into token ids and labels, cut to length.

labels[t] == input_ids[t] where token t is supervised, else -100: Hugging Face's convention, indexed by the predicted
token itself. labels[0] of every document is -100, because nothing predicts the first token.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specheads.data.row_forms import ROLES, for_template, messages_of, parse_messages, template_of

if TYPE_CHECKING:
    from specheads.data.config import DataConfig

IGNORED = -100
Row = dict[str, list[int]]
Span = tuple[int, int]
TOKEN_COLUMNS = ("labels", "loss_mask", "attention_mask", "document_ids", "position_ids")  # in addition to input_ids

_COMPARED = re.compile(r"""==\s*['"](\w+)['"]""")  # words that a template compares with, including roles
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Row:
    """One row → input_ids, labels. A row with both chat and text is a chat. Chats are cut to max_length; text is not.

    Text: every token but the first is supervised; eos is appended. Chat, in any of the forms of row_forms: the
    assistant's tokens including the end of turn, except messages with OpenAI's "weight": 0. A `tools` column is passed
    to the template. A row that already has input_ids keeps them, supervised according to its labels or loss_mask
    (without either, all but the first token); positions that its attention_mask marks as padding are left out. Raises
    ValueError for a malformed row.
    """
    if row.get("input_ids") is not None:
        return _tokens_of(row)
    if (messages := messages_of(row, config.messages_column, config.text_column)) is not None:
        return truncate(_tokenize_chat(messages, row.get("tools"), tokenizer), config.max_length, tokenizer)
    text = row.get(config.text_column)
    if text is None or not isinstance(text, str):
        raise ValueError(
            f"a row with columns {sorted(row)} has {config.text_column}={text!r:.60}: expected a string there, "
            f"or a list of messages in {config.messages_column!r}"
        )
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return {"input_ids": ids, "labels": [IGNORED, *ids[1:]] if ids else []}


def _tokens_of(row: Mapping[str, Any]) -> Row:
    """The tokens and labels of a row that is already tokenized."""
    ids = list(row["input_ids"])
    if odd := [token for token in ids if not isinstance(token, int)]:
        raise ValueError(f"a row has {odd[0]!r:.60} among its input_ids: expected whole numbers")
    columns = {name: list(row[name]) for name in TOKEN_COLUMNS if row.get(name) is not None}
    for name, column in columns.items():
        if len(column) != len(ids):
            raise ValueError(f"a row has {len(ids)} input_ids and {len(column)} {name}: expected as many")
    seen = columns.get("attention_mask", [1] * len(ids))
    ids = list(compress(ids, seen))
    columns = {name: list(compress(column, seen)) for name, column in columns.items()}
    for name, column in columns.items():
        if (name == "document_ids" and len(set(column)) > 1) or (name == "position_ids" and column != sorted(column)):
            raise ValueError(
                f"a row has several documents, by its {name} {column[:8]}: give each as a row; data.packing puts "
                "several into one"
            )
    kept = list(map(bool, columns.get("loss_mask", [1] * len(ids))))
    labels = columns.get("labels", [token if learnt else IGNORED for token, learnt in zip(ids, kept, strict=True)])
    if any(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
        raise ValueError(
            f"a row has input_ids {ids[:8]} and labels {labels[:8]}: expected each the token itself or {IGNORED} where "
            "it is not to be learnt"
        )
    if "loss_mask" in columns and [label != IGNORED for label in labels[1:]] != kept[1:]:
        raise ValueError("a row has labels and another loss_mask: leave one of the two out")
    return {"input_ids": ids, "labels": [IGNORED, *labels[1:]] if ids else []}


def _tokenize_chat(messages: Any, tools: Any, tokenizer: PreTrainedTokenizerBase) -> Row:
    tools = without_none(json.loads(tools) if isinstance(tools, str) else tools) or None
    template = template_of(tokenizer, tools)
    messages = parse_messages(without_none(messages), (*ROLES, *_COMPARED.findall(template)))
    for number, message in enumerate(messages, start=1):
        if message.keys() <= {"role"}:  # a template would write an empty turn
            raise ValueError(f"message {number}, {message!r:.80}, says nothing: expected a dict with 'content'")
    messages = [for_template(message, template) for message in messages]
    try:
        if _GENERATION_MARK.search(template):
            known: dict[str, Any] = {**tokenizer.special_tokens_map, "tools": tools, "chat_template": template}
            rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **known)
            (text,), (spans,) = rendered
            answers = messages
        else:
            text, spans = _spans_by_rendering(messages, tools, tokenizer)
            answers = messages[1:]
    except (TemplateError, TypeError) as error:  # TypeError: content that is not text
        raise ValueError(f"the chat template refuses {messages!r:.80}: {error}") from error
    spans = _without_weight_0(spans, [message for message in answers if message["role"] == "assistant"])
    spans = [_to_end_of_turn(text, start, end, tokenizer) for start, end in spans]
    ids, token_spans = _token_spans(text, spans, tokenizer)
    labels = [IGNORED] * len(ids)
    for first, stop in token_spans:
        labels[first:stop] = ids[first:stop]
    labels[:1] = [IGNORED] * len(labels[:1])
    return {"input_ids": ids, "labels": labels}


def _without_weight_0(spans: list[Span], answers: list[Any]) -> list[Span]:
    """The spans of answers whose `weight` (default 1) is not 0."""
    weights = [answer.get("weight", 1) for answer in answers]
    if odd := [weight for weight in weights if weight not in (0, 1)]:
        raise ValueError(f"a message has weight={odd[0]!r:.60}: expected 0 or 1")
    if all(weights):
        return spans
    if len(spans) != len(answers):
        raise ValueError(
            f"the chat template marks {len(spans)} spans as generated, and there are {len(answers)} messages of the "
            "assistant: a weight of 0 cannot be followed"
        )
    return [span for span, weight in zip(spans, weights, strict=True) if weight]


def without_none(value: Any) -> Any:
    """The value without keys whose value is None, in nested dicts and lists."""
    # Arrow gives every struct the fields of all rows, None where a row had none: templates would print them.
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _spans_by_rendering(messages: list[Any], tools: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The conversation as text, and the span of characters of each assistant turn: what follows its generation prompt.

    An assistant turn that opens the conversation answers no prompt and is left out. Raises ValueError if the template
    renders a turn differently once others follow it.
    """

    def render(turns: list[Any], prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt))

    text, spans = render(messages), []
    for i in range(1, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        prompt, done = render(messages[:i], prompt=True), render(messages[: i + 1])
        # Qwen3 drops a turn's thinking once another turn follows: the turn then ends at the first end of turn.
        eos_at = text.find(tokenizer.eos_token, len(prompt)) if tokenizer.eos_token else -1
        if text.startswith(prompt) and text.startswith(done):
            spans.append((len(prompt), max(len(prompt), len(done))))
        elif text.startswith(prompt) and eos_at >= 0:
            spans.append((len(prompt), eos_at + len(tokenizer.eos_token)))
        else:
            same = len(os.path.commonprefix([text, prompt if not text.startswith(prompt) else done]))  # noqa: RUF071
            raise ValueError(
                f"the chat template renders the turns up to message {i} differently when the whole conversation is "
                f"there (from {text[same : same + 40]!r} on), so the assistant's tokens cannot be found: put "
                "{% generation %} … {% endgeneration %} around them in the template, or keep one assistant turn a row"
            )
    return text, spans


def _to_end_of_turn(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> Span:
    """The span extended by the eos that follows it, without white space after its last special token.

    The assistant emits the end of turn and stops there; the newline after it is the template's.
    """
    if tokenizer.eos_token and text.startswith(tokenizer.eos_token, end):
        end += len(tokenizer.eos_token)
    bare = text[start:end].rstrip()
    return (start, start + len(bare)) if bare.endswith(tuple(tokenizer.all_special_tokens)) else (start, end)


def _token_spans(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    """Ids of the text, and for each span of characters the token range [first, stop) that overlaps it."""
    # Not apply_chat_template's own mask: if a tokenizer trims white space from its offsets (GPT-2, Llama 3), a turn
    # that starts with a space drops every later turn, and one that ends with a space includes the user's (HF 5.23).
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        counts = {0: 0, len(text): len(ids)}
        for edge in {edge for span in spans for edge in span} - set(counts):
            head = tokenizer(text[:edge], add_special_tokens=False, verbose=False)["input_ids"]
            if ids[: len(head)] != head:
                raise ValueError(
                    f"{type(tokenizer).__name__} has no offsets and merges tokens across the edge of an assistant turn "
                    f"at {text[max(0, edge - 20) : edge + 20]!r}: use the fast tokenizer"
                )
            counts[edge] = len(head)
        return ids, [(counts[start], counts[end]) for start, end in spans]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = [list(edge) for edge in zip(*encoded["offset_mapping"], strict=True)] or ([], [])
    token_spans = []
    for start, end in spans:
        first, stop = bisect_left(ends, start + 1), bisect_left(ends, end + 1)
        if stop < len(ends) and starts[stop] < end:  # a token that crosses the end belongs to the turn
            stop += 1
        token_spans.append((first, stop))
    return encoded["input_ids"], token_spans


def truncate(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The row if it fits, else the max_length tokens up to the last supervised one, starting with its bos if any."""
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) <= max_length:
        return row
    end = max((t + 1 for t, label in enumerate(labels) if label != IGNORED), default=len(ids))
    bos = _leading_bos(ids, tokenizer)
    start = max(0, end - max_length)
    return _spliced(ids, labels, start + len(bos), end, bos)


def chunk(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """A long text as consecutive rows of at most max_length tokens, each starting with the text's bos if it has one.

    The first token of a chunk is not supervised; a single leftover token, which nothing would predict, is dropped.
    """
    ids, labels = row["input_ids"], row["labels"]
    bos = _leading_bos(ids, tokenizer)
    step = max_length - len(bos)
    rows = [{"input_ids": ids[:max_length], "labels": labels[:max_length]}]
    for start in range(max_length, len(ids) - 1, step):
        rows.append(_spliced(ids, labels, start, start + step, bos))
    return rows


def _leading_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Kept at the start of a cut row: Llama and Gemma attend to it everywhere, and features are wrong without it.
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _spliced(ids: list[int], labels: list[int], start: int, end: int, bos: list[int]) -> Row:
    return {"input_ids": bos + ids[start:end], "labels": [IGNORED] * (len(bos) + 1) + labels[start + 1 : end]}
