"""Images in rows: each form that data sets have, what is left out and why, and where a long row may be cut."""

import base64
import io
import json

import pytest
import torch

from specheads.data.batches import Collator
from specheads.data.config import DataConfig
from specheads.data.conversation import Conversation
from specheads.data.datasets import build_datasets
from specheads.data.images import TYPES, ImageCut, ImageError, NoImages, open_image, tokenizer_of
from specheads.data.rows import tokenize
from tests.support.vision import V, chat, picture, processor

IMAGE = picture(5)


@pytest.fixture(scope="module")
def reader():
    return processor("Qwen2.5-VL")


def read(row, reader, **options):
    return tokenize(row, tokenizer_of(reader), DataConfig(train=["unused"], **options), processor=reader)


def png(image=IMAGE):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def asked(part, **columns):
    content = [*([] if part is None else [part]), {"type": "text", "text": "?"}]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}], **columns
    }  # fmt: skip


def rows_of(source, reader, **options):
    return build_datasets(DataConfig(train=source, **options), reader, V)[0]


def test_an_image_may_be_given_in_every_form_and_gives_the_same_row(reader, tmp_path, monkeypatch):
    """As TRL and transformers' processors take them: in a part of a message, or in a column beside the messages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png())
    text = base64.b64encode(png()).decode()
    bare = {"type": "image"}
    forms = [
        asked({"type": "image", "image": IMAGE}), asked({"type": "image", "path": "a.png"}),
        asked({"type": "image", "url": str(tmp_path / "a.png")}), asked({"type": "image", "base64": text}),
        asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}),
        asked({"type": "image", "image": {"bytes": png(), "path": None}}),
        asked(bare, images=[IMAGE]), asked(bare, images=["a.png"]), asked(bare, image=IMAGE),
        asked(None, images=[IMAGE]),
    ]  # fmt: skip
    rows = [read(form, reader) for form in forms]
    expected = rows[0]
    assert sum(expected[TYPES]) == 4 and reader.tokenizer.decode([i for i in expected["labels"] if i >= 0]) == "ok<eos>"
    for row in rows:
        assert {**row, "images": 0} == {**expected, "images": 0}
        assert open_image(row["images"][0]).tobytes() == IMAGE.tobytes()
    # From files, and from rows in memory, in which some content is text and some is parts.
    (tmp_path / "rows.jsonl").write_text(json.dumps(forms[1]) + "\n" + json.dumps(asked(None)) + "\n")
    text_row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    for source in (["rows.jsonl"], [forms[0], text_row], [forms[6], {**text_row, "images": None}]):
        held = rows_of(source, reader)
        assert held[0]["input_ids"] == expected["input_ids"] and held[0][TYPES] == expected[TYPES]
        assert held[1]["images"] == [] and not held[1][TYPES]
    # Rows of text alone are what they are with the tokenizer.
    assert rows_of([text_row], reader).column_names == ["input_ids", "labels"]


def test_rows_of_tokens_may_have_images_and_are_refused_with_others(reader, tmp_path):
    row = read(chat((["a", IMAGE], "b")), reader)
    stored = {"input_ids": row["input_ids"], "labels": row["labels"], "images": [base64.b64encode(png()).decode()]}
    again = read(stored, reader)
    batches = [Collator(0, processor=reader)([one]) for one in (row, again)]
    assert batches[0].keys() == batches[1].keys() > {"pixel_values", "image_grid_thw", TYPES}
    assert all(torch.equal(tensor, batches[1][name]) for name, tensor in batches[0].items())
    every = read({"input_ids": row["input_ids"], "images": stored["images"]}, reader)["labels"]
    assert [label == -100 for label in every] == [t == 0 or kind > 0 for t, kind in enumerate(row[TYPES])]
    larger = {**stored, "images": [base64.b64encode(png(picture(1, 24, 16))).decode()]}
    with pytest.raises(ImageError, match="have 4 tokens of images, and its images need 6"):
        read(larger, reader)
    with pytest.raises(ImageCut, match="its images are not cut"):
        read(stored, reader, max_length=6)


def test_what_cannot_be_read_is_counted_by_reason(reader, tmp_path, caplog):
    (tmp_path / "broken.png").write_bytes(png()[:40])
    image = {"type": "image", "image": IMAGE}
    good, bare = asked(image), {"type": "image"}
    bad = [
        asked({"type": "image", "path": str(tmp_path / "none.png")}),
        asked({"type": "image", "path": str(tmp_path / "broken.png")}), asked(bare), asked(image, images=[IMAGE]),
        asked({"type": "text", "text": "<|image_pad|>"}, images=[IMAGE]),
    ]  # fmt: skip
    faults = [
        "no such file", "cannot be read", "has no image, nor has the row's images column",
        "has 1 images, and its messages have parts for 0", "has 1 images, and the chat template shows 2",
    ]  # fmt: skip
    for row, fault in zip(bad, faults, strict=True):
        with pytest.raises(ImageError, match=fault):
            read(row, reader)
    lines = [asked({"type": "image", "path": str(tmp_path / name)}) for name in ("a.png", "none.png")]
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(rows_of(str(tmp_path / "rows.jsonl"), reader)) == 1
    assert "1 with an image that cannot be read (the first is row 2" in caplog.text
    with pytest.raises(NoImages, match="the base reads text alone"):
        tokenize(good, reader.tokenizer, DataConfig(train=["unused"]))
    with pytest.raises(ValueError, match=r"none of the 2 rows .* 2 with images, which are not read here"):
        rows_of(str(tmp_path / "rows.jsonl"), reader.tokenizer)
    with pytest.raises(ValueError, match=r"packing.*rows with images are not packed"):
        rows_of([good], reader, packing=True)


def test_a_long_row_keeps_whole_images_or_is_left_out(reader):
    """The tokens up to the last answer are kept; an image before them goes as a whole, never in part."""
    row = chat((["abc", picture(1)], "d"), (["efg", picture(2), "h"], "i"), (["j"], ""))
    row["messages"] = row["messages"][:-2]
    whole = read(row, reader)
    length, kinds = len(whole["input_ids"]), whole[TYPES]
    images = [range(t, t + 4) for t in range(length) if kinds[t] and not kinds[t - 1]]
    outcomes = set()
    for limit in range(4, length + 1):
        start = length - limit
        outcome = "cut" if any(image[0] < start <= image[-1] for image in images) else sum(kinds[start:]) // 4
        outcomes.add(outcome)
        if outcome == "cut":
            with pytest.raises(ImageCut, match=f"tokens {start} to {length} are kept, and image"):
                read(row, reader, max_length=limit)
            continue
        cut = read(row, reader, max_length=limit)
        assert cut["input_ids"] == whole["input_ids"][start:] and cut[TYPES] == kinds[start:]
        assert cut["images"] == whole["images"][2 - outcome :]
    assert outcomes == {0, 1, 2, "cut"}


def test_questions_with_images_are_asked_with_those_before_the_answer(reader):
    row = chat((["a", picture(1)], "b"), (["c", picture(2)], "d"))
    question = Conversation.from_messages(row["messages"], images=[])
    for answers, count in (((), 1), (("b",), 2)):
        prompt = question.prompt(answers, reader)
        assert len(question.shown(answers)) == count and prompt.count(reader.image_token_id) == 4 * count
        whole = read(row, reader)["input_ids"]
        assert whole[: len(prompt)] == prompt
    other = chat((["a", picture(3)], "b"), (["c", picture(2)], "d"))
    assert Conversation.from_messages(other["messages"], images=[]).key != question.key
    with pytest.raises(NoImages, match="give the processor"):
        question.prompt((), tokenizer_of(reader))
