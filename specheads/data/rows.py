"""Turns one row of text or chat into token ids and labels, cut to length.

labels[t] == input_ids[t] where token t is supervised, else -100: Hugging Face's convention, indexed by the predicted
token itself. labels[0] of every document is -100, because nothing predicts the first token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from specheads.data import images as image_data
from specheads.data.chat_template import ChatTemplate
from specheads.data.images import ImageCut, NoImages, cut_run, image_column, read_text, store_image, take_images
from specheads.data.row_forms import ROLES, RowError, messages_of, parse_messages, tools_of, without_none
from specheads.data.spans import Span, UncertainSpans, spans_of, specials_of

if TYPE_CHECKING:
    from specheads.data.config import DataConfig

IGNORED = -100
Row = dict[str, list[Any]]
TOKEN_COLUMNS = ("labels", "loss_mask", "attention_mask", "document_ids", "position_ids")  # in addition to input_ids

_COMPARED = re.compile(r"""==\s*['"](\w+)['"]""")  # words that a template compares with, including roles


def tokenize(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig, stop_ids: Collection[int] = (),
    processor: Any = None,
) -> Row:  # fmt: skip
    """One row → input_ids, labels. A row with both chat and text is a chat. Chats are cut to max_length; text is not.

    Text: every token but the first is supervised; eos is appended. Chat, in any of the forms of row_forms: the
    assistant's tokens including the end of turn, except messages with OpenAI's "weight": 0. A `tools` column is passed
    to the template. stop_ids: tokens besides eos at which the model stops; one may end a turn (GLM-4.5's <|user|>).
    A row that already has input_ids keeps them, supervised according to its labels or loss_mask (without either, all
    but the first token); positions that its attention_mask marks as padding are left out.
    processor: the base's, which rows with images need. Such a row also has images (`images.store_image`) and
    mm_token_type_ids, what each token is; images are never supervised, and never cut.

    Raises RowError, a ValueError, for a row that is malformed or whose answers are uncertain; MissingTemplate.
    """
    if row.get("input_ids") is not None:
        return _with_images(_tokens_of(row), row, processor, config.max_length)
    if (messages := messages_of(row, config.messages_column, config.text_column)) is not None:
        return _tokenize_chat(row, messages, tokenizer, config, stop_ids, processor)
    text = row.get(config.text_column)
    if text is None or not isinstance(text, str):
        raise RowError(
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
        raise RowError(f"a row has {odd[0]!r:.60} among its input_ids: expected whole numbers")
    columns = {name: list(row[name]) for name in TOKEN_COLUMNS if row.get(name) is not None}
    for name, column in columns.items():
        if len(column) != len(ids):
            raise RowError(f"a row has {len(ids)} input_ids and {len(column)} {name}: expected as many")
    seen = columns.get("attention_mask", [1] * len(ids))
    ids = list(compress(ids, seen))
    columns = {name: list(compress(column, seen)) for name, column in columns.items()}
    for name, column in columns.items():
        if (name == "document_ids" and len(set(column)) > 1) or (name == "position_ids" and column != sorted(column)):
            raise RowError(
                f"a row has several documents, by its {name} {column[:8]}: give each as a row; data.packing puts "
                "several into one"
            )
    kept = list(map(bool, columns.get("loss_mask", [1] * len(ids))))
    labels = columns.get("labels", [token if learnt else IGNORED for token, learnt in zip(ids, kept, strict=True)])
    if any(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
        raise RowError(
            f"a row has input_ids {ids[:8]} and labels {labels[:8]}: expected each the token itself or {IGNORED} where "
            "it is not to be learnt"
        )
    if "loss_mask" in columns and [label != IGNORED for label in labels[1:]] != kept[1:]:
        raise RowError("a row has labels and another loss_mask: leave one of the two out")
    return {"input_ids": ids, "labels": [IGNORED, *labels[1:]] if ids else []}


def _tokenize_chat(
    row: Mapping[str, Any],
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    stop_ids: Collection[int],
    processor: Any,
) -> Row:
    messages, sources = take_images(messages, row)
    if sources and processor is None:
        raise NoImages(NO_PROCESSOR)
    template = ChatTemplate(tokenizer, tools_of(row), config.chat_template_kwargs or {})
    messages = parse_messages(without_none(messages), (*ROLES, *_COMPARED.findall(template.source)))
    for number, message in enumerate(messages, start=1):
        if message.keys() <= {"role"}:  # a template would write an empty turn
            raise RowError(f"message {number}, {message!r:.80}, says nothing: expected a dict with 'content'")
    stops = [tokenizer.eos_token, *tokenizer.convert_ids_to_tokens([*stop_ids])]
    text, spans = spans_of(messages, template, [stop for stop in stops if stop in specials_of(tokenizer)])
    answers = messages if template.marks_answers else messages[1:]
    spans = _without_weight_0(spans, [message for message in answers if message["role"] == "assistant"])
    if sources:
        stored = [store_image(source) for source in sources]
        read = read_text(processor, text, stored)
        ids, token_spans = read.ids, spans_in(read.offsets, [(read.shift(a), read.shift(b)) for a, b in spans])
    else:
        ids, token_spans = _token_spans(text, spans, tokenizer)
    labels = [IGNORED] * len(ids)
    for first, stop in token_spans:
        labels[first:stop] = ids[first:stop]
    labels[:1] = [IGNORED] * len(labels[:1])
    if not sources:
        return truncate({"input_ids": ids, "labels": labels}, config.max_length, tokenizer)
    labels = [IGNORED if kind else label for label, kind in zip(labels, read.types, strict=True)]
    start, end = cut_of(labels, config.max_length)
    bos = _leading_bos(ids, tokenizer) if start else []
    kept = cut_run(read.runs, start + len(bos), end)
    row = _spliced(ids, labels, start + len(bos), end, bos)
    types = [0] * len(bos) + read.types[start + len(bos) : end]
    return {**row, "images": [stored[i] for i in kept], image_data.TYPES: types}


NO_PROCESSOR = "the base reads text alone, or AutoProcessor finds no processor of images beside it"


def _with_images(tokens: Row, row: Mapping[str, Any], processor: Any, max_length: int) -> Row:
    """A row of tokens with the images that its placeholders stand for."""
    sources = image_column(row)
    if not sources:
        return tokens
    if processor is None:
        raise NoImages(NO_PROCESSOR)
    stored = [store_image(source) for source in sources]
    types = image_data.token_types(processor, tokens["input_ids"])
    there, expected = sum(map(bool, types)), image_data.count_placeholders(processor, stored)
    if there != expected:
        raise image_data.ImageError(f"its input_ids have {there} tokens of images, and its images need {expected}")
    if len(types) > max_length:
        raise ImageCut(f"it has {len(types)} tokens, max_length is {max_length}, and its images are not cut")
    labels = [IGNORED if kind else label for label, kind in zip(tokens["labels"], types, strict=True)]
    return {**tokens, "labels": labels, "images": stored, image_data.TYPES: types}


def _without_weight_0(spans: list[Span], answers: list[Any]) -> list[Span]:
    """The spans of answers whose `weight` (default 1) is not 0."""
    weights = [answer.get("weight", 1) for answer in answers]
    if odd := [weight for weight in weights if weight not in (0, 1)]:
        raise RowError(f"a message has weight={odd[0]!r:.60}: expected 0 or 1")
    if all(weights):
        return spans
    if len(spans) != len(answers):
        raise RowError(
            f"the chat template marks {len(spans)} spans as generated, and there are {len(answers)} messages of the "
            "assistant: a weight of 0 cannot be followed"
        )
    return [span for span, weight in zip(spans, weights, strict=True) if weight]


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
                raise UncertainSpans(
                    f"{type(tokenizer).__name__} has no offsets and merges tokens across the edge of an assistant turn "
                    f"at {text[max(0, edge - 20) : edge + 20]!r}: use the fast tokenizer"
                )
            counts[edge] = len(head)
        return ids, [(counts[start], counts[end]) for start, end in spans]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], spans_in(encoded["offset_mapping"], spans)


def spans_in(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Span]:
    """For each span of characters the token range [first, stop) that overlaps it. offsets: of the tokens."""
    starts, ends = [list(edge) for edge in zip(*offsets, strict=True)] or ([], [])
    token_spans = []
    for start, end in spans:
        first, stop = bisect_left(ends, start + 1), bisect_left(ends, end + 1)
        if stop < len(ends) and starts[stop] < end:  # a token that crosses the end belongs to the turn
            stop += 1
        token_spans.append((first, stop))
    return token_spans


def truncate(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The row if it fits, else the max_length tokens up to the last supervised one, starting with its bos if any."""
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) <= max_length:
        return row
    start, end = cut_of(labels, max_length)
    bos = _leading_bos(ids, tokenizer)
    return _spliced(ids, labels, start + len(bos), end, bos)


def cut_of(labels: Sequence[int], max_length: int) -> tuple[int, int]:
    """The tokens [start, end) of a row that are kept: all if they fit, else those up to the last supervised one."""
    if len(labels) <= max_length:
        return 0, len(labels)
    end = max((t + 1 for t, label in enumerate(labels) if label != IGNORED), default=len(labels))
    return max(0, end - max_length), end


def chunk(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """A long text as consecutive rows of at most max_length tokens, each starting with the text's bos if it has one.

    The first token of a chunk is not supervised; a single leftover token, which nothing would predict, is dropped.
    """
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) <= max_length:
        return [row]
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
