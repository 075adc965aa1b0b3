"""What a run logs: every step, to trackers, and as lines and tables on the screen."""

import json
import re
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from specheads.losses.metrics import accepted_length
from specheads.training.report.log import AcceptanceLog, Pace, evaluation_table
from specheads.training.trainer.trainer import AcceptanceProgress
from tests.support.trainers import OPTIONS, logged, model_of, rows, trainer_of


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
            assert any(name.startswith(prefix + start) for name in logs for start in ("loss_depth_", "token_loss"))
    assert [logs for _, logs in training] == [
        {k: v for k, v in entry.items() if k != "step"} for entry in trainer.state.log_history if "loss" in entry
    ]  # fmt: skip


def printed(folder, capsys, **options):
    """What a run with evaluations prints on stdout."""
    trainer = trainer_of(folder, evaluation=rows(4, 1, (6, 12)), **{"max_steps": 6, "eval_strategy": "steps",
                         "eval_steps": 3, "logging_steps": 2, **options})  # fmt: skip
    trainer.train()
    return trainer, capsys.readouterr()


def test_a_second_run_logs_nothing_of_the_first(tmp_path):
    trainer = trainer_of(
        tmp_path, model_of("medusa"), logging_steps=3, learning_rate=0.0
    )  # of 4 steps the last unlogged
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append(logged(trainer, "tokens_seen", "accepted_length", "loss_depth_1"))
    assert len(runs[0]) == 1 and runs[0] == runs[1]


@pytest.mark.parametrize("bar", [False, True])
def test_without_a_terminal_each_log_is_a_plain_line_that_has_the_accepted_length(bar, tmp_path, capsys):
    trainer, shown = printed(tmp_path, capsys, disable_tqdm=not bar)
    lines = [line for line in shown.out.splitlines() if line.startswith("step ")]
    assert len(lines) == 3 and "\r" not in shown.out + shown.err and "it/s" not in shown.err
    for entry, line in zip(logged(trainer), lines, strict=True):
        assert f"step {entry['step']}/6  loss {entry['loss']:.3f}  lr {entry['learning_rate']:.2e}" in line
        assert f"accepted length {entry['accepted_length']:.2f}" in line
        assert re.search(r"[1-9][\d,]* tokens/s  \d+:\d\d left$", line)
    assert shown.out.count("estimated from the training batches (greedy chains of 2 drafts") == 1
    assert "{'" not in shown.out and "trained: 6 steps in" in shown.out


def test_an_evaluation_is_a_table_with_the_one_before_beside_it(tmp_path, capsys):
    trainer, shown = printed(tmp_path, capsys)
    first, second = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert "conditional_accuracy_depth_1" in " ".join(first)  # in the log, and not on the screen
    tables = shown.out.split("evaluation at step ")[1:]
    assert [table.splitlines()[0].split(",")[0] for table in tables] == ["3: 4 held-out rows", "6: 4 held-out rows"]
    for name, label, digits in (("loss", "loss", 3), ("accepted_length", "accepted length, chain of 2", 2),
                                ("accuracy_depth_2", "accuracy at depth 2", 3)):  # fmt: skip
        old, new = first[f"eval_{name}"], second[f"eval_{name}"]
        row = next(line for line in tables[1].splitlines() if line.strip().startswith(f"{label}  "))
        assert row.split()[-3:] == [f"{new:.{digits}f}", f"{old:.{digits}f}", f"{new - old:+.{digits}f}"]
    assert "change" not in tables[0] and "step 6   step 3   change" in tables[1]
    assert not any("conditional" in table for table in tables)


def test_the_rows_of_a_long_evaluation_are_counted_and_not_figured_out_from_a_rounded_rate(tmp_path):
    trainer = trainer_of(tmp_path, data=rows(4), evaluation=rows(5))
    logs = trainer.evaluate()
    # What transformers would say of 5 rows in an hour.
    table = evaluation_table({**logs, "eval_runtime": 3600.0, "eval_samples_per_second": 0.001}, [], 0)
    assert "evaluation at step 0: 5 held-out rows, 3600.0 s" in table


def test_a_long_evaluation_in_a_log_says_every_few_seconds_how_long_it_takes(capsys):
    times = iter([0.0, 0.0, 0.0, 10.0, 20.0])
    printer = AcceptanceLog(Pace(lambda: next(times)))
    state = SimpleNamespace(is_world_process_zero=True)
    for _ in range(4):
        printer.on_prediction_step(None, state, None, eval_dataloader=range(8))
    assert capsys.readouterr().out == "evaluation 50%  0:20 left\n"


def test_several_held_out_sets_are_compared_each_with_itself():
    history = [
        {"eval_a_runtime": 1.0, "eval_a_loss": 5.0, "step": 2}, {"eval_b_runtime": 1.0, "eval_b_loss": 9.0, "step": 2},
        {"eval_a_runtime": 1.0, "eval_a_loss": 4.0, "step": 4},
    ]  # fmt: skip
    row = evaluation_table(history[-1], history, 4).splitlines()[-1]
    assert row.split() == ["loss", "4.000", "5.000", "-1.000"]


def test_tokens_a_second_are_those_of_the_steps_alone():
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.begin(0)
    for seconds in (2.0, 2.0):
        pace.step_begins()
        now[0] += seconds
        pace.step_ends()
    pace.interrupt()  # an evaluation of 100 s
    now[0] += 100
    pace.step_begins()
    now[0] += 1
    pace.step_ends()
    pace.tokens += 500
    assert pace.rate() == 100 and pace.left(3, 6) == 105
    now[0] += 10
    pace.tokens += 50
    assert pace.rate() == 5


def test_a_run_that_resumes_between_two_logs_says_no_speed_that_it_cannot_know():
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.begin(7)
    now[0], pace.tokens = 1.0, 10_000  # of the run before, too
    assert pace.rate() is None
    now[0], pace.tokens = 2.0, 30
    assert pace.rate() == 30


def test_on_a_terminal_the_lines_are_written_above_the_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    trainer = trainer_of(tmp_path, disable_tqdm=False)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    assert isinstance(callback, AcceptanceProgress)
    trainer.train()
    assert capsys.readouterr().out.count("accepted length 1.") == 4


def test_a_printer_of_the_users_own_stays(tmp_path, capsys):
    class Own(PrinterCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            print("own", *sorted(logs)[:1])

    trainer = trainer_of(tmp_path)
    trainer.remove_callback(PrinterCallback)  # ours is one of that kind
    trainer.add_callback(Own())
    trainer.train()
    out = capsys.readouterr().out
    assert "own accepted_length" in out and "step " not in out


def test_a_figure_that_this_evaluation_lacks_is_one_line(tmp_path):
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy_depth_9",
        "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"metric_for_best_model=accuracy_depth_9: .*\baccepted_length, ") as told:
        trainer_of(tmp_path, evaluation=rows(5, 1), **options).train()
    assert "\n" not in str(told.value)
