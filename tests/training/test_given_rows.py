"""Rows given to SpecTrainer as people give them: text, chats, ragged, with nothing to learn."""

import logging

import datasets
import pytest
import torch

from specheads.data.batches import Collator
from specheads.training.recipe.arguments import SpecTrainingArguments
from specheads.training.trainer.trainer import SpecTrainer
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.trainers import model_of, rows, same, trainer_of, weights

TEXTS = [f"row number {i} of a few" for i in range(6)]
CHATS = [[{"role": "user", "content": "is it even?"}, {"role": "assistant", "content": text}] for text in TEXTS]


def plain(folder, data, **options):
    """A trainer with no collator of the user's."""
    settings = {"use_cpu": True, "max_steps": 2, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True}
    arguments = SpecTrainingArguments(str(folder), seed=5, per_device_train_batch_size=2, logging_steps=1, **settings)
    model = options.pop("model", None) or model_of("medusa")
    return SpecTrainer(model, arguments, train_dataset=data, **options)


@pytest.mark.parametrize("form", ["list", "dataset"])
@pytest.mark.parametrize("column", ["text", "messages"])
def test_rows_of_text_and_chats_are_tokenized_with_the_tokenizer_given(column, form, tmp_path):
    data = [{column: value} for value in (TEXTS if column == "text" else CHATS)]
    data = data if form == "list" else datasets.Dataset.from_list(data)
    tokenizer = build_tokenizer()
    model = model_of("medusa", base={"vocab_size": len(tokenizer)})
    trainer = plain(tmp_path, data, model=model, eval_dataset={"few": data}, processing_class=tokenizer)
    trainer.train()
    learnt = [[i for i in row["labels"] if i != -100] for row in trainer.train_dataset]
    assert len(learnt) == 6 and all(tokenizer.decode(ids).startswith("row number")
                                    or column == "text" for ids in learnt)  # fmt: skip
    assert trainer.state.log_history[0]["tokens_seen"] > 0
    assert trainer.evaluate()["eval_few_rows"] == 6


def test_text_without_a_tokenizer_is_refused_with_what_to_pass(tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset have text and no input_ids.* pass processing_class="):
        plain(tmp_path, [{"text": "a"}])
    stream = datasets.Dataset.from_list([{"messages": CHATS[0]}]).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"eval_dataset have messages and no input_ids, and they are a stream"):
        plain(tmp_path, rows(), eval_dataset=stream, processing_class=build_tokenizer())


def test_ragged_rows_are_padded_as_by_our_collator(tmp_path):
    lists = [dict(row) for row in rows(6)]
    assert len({len(row["input_ids"]) for row in lists}) > 2
    masks = [{"input_ids": r["input_ids"], "loss_mask": [i != -100 for i in r["labels"]]} for r in lists]
    bare = [{"input_ids": r["input_ids"]} for r in lists]  # all but the first token, as in these labels
    trained = []
    for data in (lists, masks, bare, datasets.Dataset.from_list(lists)):
        trainer = plain(tmp_path, data)
        trainer.train()
        trained.append(weights(trainer.model))
    trainer = plain(tmp_path, lists, data_collator=Collator(3))
    trainer.train()
    assert all(same(trained[0], other) for other in (*trained[1:], weights(trainer.model)))


@pytest.mark.parametrize("form", ["list", "dataset", "mask"])
def test_rows_with_nothing_to_learn_are_left_out_with_their_number(form, tmp_path, caplog):
    blank = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}, {"input_ids": [5, 6, 7], "labels": [5, -100, -100]}]
    good = [dict(row) for row in rows(4)]
    data = [blank[0], *good[:2], blank[1], *good[2:]]
    if form == "mask":
        data = [{"input_ids": r["input_ids"], "loss_mask": [i != -100 for i in r["labels"]]} for r in data]
    data = datasets.Dataset.from_list(data) if form == "dataset" else data
    trainer = plain(tmp_path, data)
    assert [list(row["input_ids"]) for row in trainer.train_dataset] == [row["input_ids"] for row in good]
    assert "train_dataset: left out 2 of 6 rows with no token to learn from" in caplog.text
    with pytest.raises(ValueError, match="none of the 2 rows of train_dataset has a token to learn from"):
        plain(tmp_path, blank)


def test_rows_made_as_they_are_read_are_not_looked_at_and_a_log_without_a_token_says_so(tmp_path, caplog):
    reads = []

    def blank(batch):
        reads.append(1)
        return {"input_ids": [[5, 6, 7]] * len(batch["n"]), "labels": [[-100] * 3] * len(batch["n"])}

    made = datasets.Dataset.from_dict({"n": list(range(4))}).with_transform(blank)
    trainer = trainer_of(tmp_path, model_of("medusa"), data=made, max_steps=1, remove_unused_columns=False)
    assert len(reads) <= 1
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "step 1: no row since the last log had a token to learn from" in caplog.text
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
