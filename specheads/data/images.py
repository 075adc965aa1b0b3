"""Images of chats: from the forms of data sets to a base's own tokens and tensors, by its processor.

A row keeps its images as files or bytes, and its tokens with a placeholder for every feature of an image; the tensors
of the images are made again for each batch. Shapes: T tokens of a row.
"""

from __future__ import annotations

import base64
import copy
import io
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specheads.data.row_forms import Message, RowError

COLUMNS = ("images", "image")  # of a data set, besides the parts of messages
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")  # processors' names for what each token is; 0 is text
TYPES = "mm_token_type_ids"  # the column of our rows and batches with them
_SOURCES = ("image", "url", "path", "base64", "image_url")  # keys of a part that hold its image
Stored = dict[str, Any]  # {"bytes": …, "path": …}, one of which is None, as the datasets library stores an image
Run = tuple[int, int]  # [first, stop) in the tokens of a row


class ImageError(RowError):
    """An image that cannot be read."""

    reason = "with an image that cannot be read"


class NoImages(RowError):
    """Images where text alone is read."""

    reason = "with images, which are not read here"


class ImageCut(RowError):
    """A row whose limit of tokens falls inside an image."""

    reason = "longer than max_length, which would cut an image"


def tokenizer_of(processing: Any) -> Any:
    """The tokenizer of a processor, with its chat template; a tokenizer itself."""
    tokenizer = getattr(processing, "tokenizer", None)
    if tokenizer is None or not hasattr(processing, "image_processor"):
        return processing if tokenizer is None else tokenizer
    if getattr(processing, "chat_template", None) and not getattr(tokenizer, "chat_template", None):
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = processing.chat_template
    return tokenizer


def processor_of(processing: Any) -> Any:
    """The processor, if it reads images; None for a tokenizer."""
    return processing if hasattr(processing, "image_processor") and hasattr(processing, "tokenizer") else None


def is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def image_column(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row beside its messages."""
    column: Any = next((row[name] for name in COLUMNS if row.get(name) is not None), [])
    return list(column) if isinstance(column, (list, tuple)) else [column]


def take_images(messages: Any, row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The messages with bare image parts, {"type": "image"}, and the sources of their images in order.

    A part holds its image (image, url, path, base64, or OpenAI's image_url), or it stands for the next of the row's
    `images` column (or its one `image`). Without any part the column's images come before the first user message, as
    in TRL. ImageError if there are more or fewer images than parts.
    """
    waiting = image_column(row)
    if not isinstance(messages, (list, tuple)):
        return messages, []
    total, parts = len(waiting), [part for message in messages for part in _parts(message) if is_image_part(part)]
    if waiting and not parts:
        return _before_the_first_question(messages, total), waiting
    sources: list[Any] = []
    for part in parts:
        found = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
        if isinstance(found, Mapping) and "url" in found:
            found = found["url"]
        if found is None:
            if not waiting:
                raise ImageError(f"a part {dict(part)!r:.80} has no image, nor has the row's images column ({total})")
            found = waiting.pop(0)
        sources.append(found)
    if waiting:
        raise ImageError(f"the row has {total} images, and its messages have parts for {total - len(waiting)}")
    return [_bare(message) for message in messages], sources


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _bare(message: Any) -> Any:
    if not any(map(is_image_part, _parts(message))):
        return message
    return {
        **message, "content": [{"type": "image"} if is_image_part(part) else part for part in message["content"]]
    }  # fmt: skip


def _before_the_first_question(messages: Sequence[Any], count: int) -> list[Any]:
    asked = next((i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "user"), None)
    if asked is None:
        raise ImageError("the row has images, and no message of the user that could show them")
    content = messages[asked].get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    shown: Message = {**messages[asked], "content": [*[{"type": "image"}] * count, *text]}
    return [*messages[:asked], shown, *messages[asked + 1 :]]


def store_image(source: Any) -> Stored:
    """A file's path, or the bytes of anything else: an address, base64, a PIL image, {"bytes": …, "path": …}.

    The image is read once, so that ImageError names what is missing or damaged before training begins.
    """
    stored: Stored = {"bytes": None, "path": None}
    try:
        if isinstance(source, Mapping):
            if source.get("bytes") is not None:
                stored["bytes"] = bytes(source["bytes"])
            elif isinstance(source.get("path"), str):
                return store_image(source["path"])
            else:
                raise ValueError("expected bytes or a path")
        elif isinstance(source, str) and not source.startswith(("http://", "https://", "data:")):
            if os.path.isfile(source):
                stored["path"] = os.path.abspath(source)
            else:
                stored["bytes"] = _decoded(source)
        else:
            from transformers.image_utils import load_image

            stored["bytes"] = _encoded(load_image(source))
        open_image(stored)
    except ImageError:
        raise
    except Exception as error:  # PIL, base64 and the network raise all kinds
        raise ImageError(f"image {source!r:.80} cannot be read: {error}") from error
    return stored


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ImageError(f"image {text!r:.80}: no such file (looked from {os.getcwd()}), address or base64") from None


def _encoded(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def written(stored: Mapping[str, Any]) -> str:
    """A stored image as a row of a JSON file has it: its path, or base64."""
    return stored["path"] or base64.b64encode(stored["bytes"]).decode()


def open_image(stored: Mapping[str, Any]) -> Any:
    """The PIL image, in RGB."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"]) as image:
        upright: Any = ImageOps.exif_transpose(image)
        return upright.convert("RGB")


@dataclass(frozen=True)
class ImageTokens:
    """A text with its images as tokens. ids, types, offsets: one for each token; runs: the tokens of each image, the
    marks around it included. shift: the position of a character of the text → that among the offsets."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    runs: list[Run]
    ends: list[int]
    gains: list[int]

    def shift(self, character: int) -> int:
        return character + self.gains[bisect_right(self.ends, character)]


def read_text(processor: Any, text: str, images: Sequence[Stored]) -> ImageTokens:
    """The text that a chat template wrote, with the images it shows. ImageError if it shows another number."""
    token = getattr(processor, "image_token", None)
    if token is None or text.count(token) != len(images):
        shown = "none that can be counted" if token is None else text.count(token)
        raise ImageError(f"the row has {len(images)} images, and the chat template shows {shown}")
    out = processor(
        text=[text], images=[[open_image(one) for one in images]], add_special_tokens=False,
        return_offsets_mapping=True, return_text_replacement_offsets=True, return_mm_token_type_ids=True,
    )  # fmt: skip
    missing = {"offset_mapping", "text_replacement_offsets"} - out.keys()
    if missing or not any(name in out for name in PER_TOKEN):
        raise ValueError(
            f"{type(processor).__name__} does not say where the tokens of an image are "
            f"({', '.join(sorted(missing)) or PER_TOKEN[0]}): rows with images need a fast tokenizer and a processor "
            "of transformers 5.23 or later"
        )
    ids, offsets = list(out["input_ids"][0]), [(int(a), int(b)) for a, b in out["offset_mapping"][0]]
    replaced = out["text_replacement_offsets"][0]
    runs = [_tokens_in(offsets, *each["new_span"]) for each in replaced]
    gains = [0, *(each["new_span"][1] - each["span"][1] for each in replaced)]
    return ImageTokens(ids, token_types(processor, ids), offsets, runs, [each["span"][1] for each in replaced], gains)


def _tokens_in(offsets: Sequence[tuple[int, int]], start: int, end: int) -> Run:
    inside = [t for t, (first, stop) in enumerate(offsets) if first < end and stop > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def token_types(processor: Any, ids: Sequence[int]) -> list[int]:
    """What each token is, as the processor tells the base: 0 text, 1 an image."""
    return [int(kind) for kind in processor.create_mm_token_type_ids([list(ids)])[0]]


def image_tensors(processor: Any, images: Sequence[Stored]) -> dict[str, Any]:
    """What the base's forward is given of these images, in order: pixel_values and what goes with them."""
    out = _placeholders(processor, images, return_tensors="pt")
    return {name: value for name, value in out.items() if name not in ("input_ids", "attention_mask", *PER_TOKEN)}


def count_placeholders(processor: Any, images: Sequence[Stored]) -> int:
    """How many tokens stand for features of these images."""
    return sum(map(bool, token_types(processor, _placeholders(processor, images)["input_ids"][0])))


def _placeholders(processor: Any, images: Sequence[Stored], **options: Any) -> Any:
    return processor(
        text=[processor.image_token * len(images)], images=[[open_image(one) for one in images]], **options
    )


def cut_run(runs: Sequence[Run], start: int, stop: int) -> list[int]:
    """Which images are among the tokens [start, stop). ImageCut if one is there in part."""
    kept = [i for i, (first, last) in enumerate(runs) if first >= start and last <= stop]
    if cut := [i for i, (first, last) in enumerate(runs) if i not in kept and first < stop and last > start]:
        first, last = runs[cut[0]]
        raise ImageCut(
            f"tokens {start} to {stop} are kept, and image {cut[0] + 1} is at {first} to {last}: a longer max_length, "
            "or smaller images, keep it"
        )
    return kept
