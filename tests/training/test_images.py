"""Rows with images train heads as rows of text do: through the base's processor, and through its own forward."""

from types import SimpleNamespace

import pytest
import torch

import specheads
from specheads.data.batches import Collator
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets
from specheads.data.images import TYPES
from tests.reference.slow_heads import slow_eagle3, spec_model
from tests.support.vision import IMAGE_TOKENS, V, VISION, chat, picture, processor

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CHATS = [
    chat((["l ", picture(1, 24, 16), " h"], "a c")),
    chat((["p"], "text")),
    chat((["x", picture(2), picture(3), "y"], "2"), ([picture(4), "z"], "one")),
]


def plain_inputs(reader, messages, base):
    """What transformers' own processor makes of a chat, for the base alone."""
    listed = [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in messages
    ]
    out = reader.apply_chat_template(listed, tokenize=True, return_dict=True, return_tensors="pt")
    dropped = set() if "Qwen" in type(base).__name__ else {"mm_token_type_ids"}
    return {k: v.double() if v.is_floating_point() else v for k, v in out.items() if k not in dropped}


def plain_model(model, inputs):
    """The model with a base whose pass is that of the row's own inputs, for the slow heads."""

    class Base:
        get_input_embeddings = model.base.get_input_embeddings

        def __call__(self, ids, **options):
            assert ids.tolist() == inputs["input_ids"].tolist()
            return model.base(**inputs, **options)

    return SimpleNamespace(base=Base(), head=model.head)


@pytest.mark.parametrize("family", IMAGE_TOKENS)
def test_loss_and_gradients_of_rows_with_images_are_those_of_each_row_alone(family):
    base, reader = VISION[family]()[0].double(), processor(family)
    model = spec_model("eagle3", base, rope_parameters=ROPE)
    data, _ = build_datasets(DataConfig(train=CHATS), reader, V)
    plain = [plain_inputs(reader, asked["messages"], base) for asked in CHATS]
    likeliest = torch.cat([base(**inputs).logits.argmax(-1)[0] for inputs in plain])
    model.head.set_draft_vocabulary(torch.bincount(likeliest, minlength=V), base)
    assert [sum(row[TYPES]) > 0 for row in data] == [True, False, True] and len(data[2]["images"]) == 3
    batch = Collator(0, processor=reader)([data[i] for i in range(3)])
    assert not ((batch["labels"] != -100) & (batch[TYPES] > 0)).any()
    loss = model.train()(**batch).loss
    trained = [p for p in model.head.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained)
    total, tokens = 0.0, 0
    for row, asked, inputs in zip(data, CHATS, plain, strict=True):
        learnt = [label for label in row["labels"] if label != -100]
        answers = [m["content"] for m in asked["messages"] if m["role"] == "assistant"]
        assert reader.tokenizer.decode(learnt) == "".join(f"{answer}<eos>" for answer in answers)
        total += slow_eagle3(plain_model(model, inputs), {**row, "input_ids": inputs["input_ids"][0].tolist()})[0]
        tokens += len(learnt)
    assert loss.item() == pytest.approx((total / tokens).item(), rel=1e-6)
    for fast, slow in zip(grads, torch.autograd.grad(total / tokens, trained), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5 * max(1.0, float(slow.abs().max())))
