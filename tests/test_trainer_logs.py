"""What a run logs: every step, to trackers and to the progress bar."""

import io
import json
from typing import ClassVar

import pytest
import torch
from tqdm import tqdm
from trainers import OPTIONS, logged, model_of, rows, trainer_of
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from specheads.metrics import accepted_length
from specheads.trainer import AcceptanceProgress


def test_logs_cover_every_step_since_the_last_log(tmp_path):
    each = trainer_of(tmp_path, logging_steps=1)
    both = trainer_of(tmp_path, logging_steps=2)
    seen = []
    add = type(each._training_meter).add

    def spy(meter, ranks, terms, num_items, tokens):
        seen.append((ranks, {k: v.clone() for k, v in terms.items()}, int(tokens)))
        add(meter, ranks, terms, num_items, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(each._training_meter), "add", spy)
        each.train()
    both.train()
    assert len(seen) == 4
    for i, entry in enumerate(logged(both)):
        pair = seen[2 * i : 2 * i + 2]
        assert entry["accepted_length"] == pytest.approx(accepted_length(torch.cat([ranks for ranks, _, _ in pair])))
        summed = sum(float(terms["loss_depth_1"]) * tokens for _, terms, tokens in pair)
        mean = summed / sum(tokens for *_, tokens in pair)
        assert entry["loss_depth_1"] == pytest.approx(mean, rel=1e-6)


class Tracker(TrainerCallback):
    """What a tracker is sent, and what it is told of the run at the start."""

    made: ClassVar = []

    def __init__(self):
        self.sent, self.run = [], None
        self.made.append(self)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.run = {**args.to_dict(), **model.config.to_dict()}  # what wandb and tensorboard record of it

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sent.append((state.global_step, dict(logs)))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_tracker_is_sent_accepted_length_and_accuracy_by_depth(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)  # as report_to finds an installed one
    monkeypatch.setattr(Tracker, "made", [])
    more = {"steps": 2} if kind == "eagle" else {}  # it is trained on one depth, unless told
    trainer = trainer_of(
        tmp_path, model_of(kind, **more), rows(4, 1, (6, 12)), report_to="tensorboard", max_steps=6, logging_steps=2,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer.train()
    (tracker,) = Tracker.made
    assert json.dumps(tracker.run["head"]) and tracker.run["head"]["kind"] == kind
    training = [(step, logs) for step, logs in tracker.sent if "loss" in logs]
    evaluation = [(step, logs) for step, logs in tracker.sent if "eval_loss" in logs]
    assert [step for step, _ in training] == [2, 4, 6] and [step for step, _ in evaluation] == [3, 6]
    for prefix, sent in (("", training), ("eval_", evaluation)):
        for _, logs in sent:
            numbers = [logs[prefix + "accepted_length"], *(logs[f"{prefix}accuracy_depth_{k}"] for k in (1, 2))]
            assert all(isinstance(number, float) for number in numbers)
            assert 1 <= numbers[0] <= 1 + sum(numbers[1:])
            assert any(name.startswith(prefix + start) for name in logs for start in ("loss_depth_", "law"))
    assert [logs for _, logs in training] == [
        {k: v for k, v in entry.items() if k != "step"} for entry in logged(trainer)
    ]  # fmt: skip


def test_the_progress_bar_shows_the_accepted_length(tmp_path):
    trainer = trainer_of(tmp_path, disable_tqdm=False)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, AcceptanceProgress)]
    shown = io.StringIO()
    callback.training_bar = tqdm(total=4, file=shown)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 2.0, "accepted_length": 1.75})
    assert "accepted=1.75" in shown.getvalue() and "loss=2" in shown.getvalue()
