"""A run that resumes with another number of processes is the run that was interrupted: its rows, losses and logs."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

from specheads.training.distributed.resume import ResumeError, Unlogged, Writers
from tests.support.trainers import logged, model_of, rows, same, trainer_of, weights
from tests.support.training_runs import assert_same_run, forked
from tests.workers.runs_of_two import KINDS, SAVED, run, run_by_two


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """By kind that a selected test compares: the whole run of one process; and the folder with those of two."""
    folder = tmp_path_factory.mktemp("runs")
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")
             and item.path == request.path]  # fmt: skip
    kinds = sorted({"medusa", *(params["kind"] for params in calls if "kind" in params)})
    whole = {kind: run(folder / f"{kind}-by-one", kind, 1) for kind in kinds}
    forked(2, run_by_two, folder, kinds)
    return whole, folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_one_process_resumes_where_two_stopped(runs, kind, tmp_path):
    whole, folder = runs
    resumed = run(tmp_path, kind, 1, str(folder / f"{kind}-by-two" / f"checkpoint-{SAVED}"))
    weights = {f"head.{name}": tensor for name, tensor in resumed.model.head.state_dict().items()}
    assert_same_run(whole[kind], resumed.state.log_history, weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_two_processes_resume_where_one_stopped(runs, kind):
    whole, folder = runs
    log = json.loads((folder / f"{kind}.json").read_text())
    assert_same_run(whole[kind], log, load_file(folder / f"{kind}-resumed-by-two" / "model.safetensors"))
    alone = whole[kind].evaluate()
    for name in ("eval_loss", "eval_accepted_length", "eval_accuracy_depth_1"):
        assert log[-1][name] == pytest.approx(alone[name], rel=1e-3), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_gradients_are_summed_over_processes_once_a_step_whatever_it_accumulates(runs, kind):
    assert json.loads((runs[1] / f"{kind}-reductions.json").read_text()) == list(range(6))


def test_a_step_of_other_rows_is_refused_unless_the_data_begin_anew(runs, tmp_path):
    checkpoint = str(runs[1] / "medusa-by-two" / f"checkpoint-{SAVED}")
    with pytest.raises(ResumeError, match=r"4 rows a step \(2 processes\); this one has 6 \(1 processes\)"):
        run(tmp_path, "medusa", 1, checkpoint, per_device_train_batch_size=3)
    resumed = run(tmp_path, "medusa", 1, checkpoint, per_device_train_batch_size=3, ignore_data_skip=True)
    assert resumed.state.global_step == 6


def evaluate_and_train(folder):
    rank = os.environ["RANK"]
    trainer = trainer_of(folder / "run", evaluation=rows(4, 1), bf16=True, max_steps=2)
    trainer.evaluate()
    trainer.train()
    torch.save((weights(trainer.model), len(logged(trainer, "loss"))), folder / f"{rank}.pt")


def test_processes_that_evaluate_before_they_train_train_together(tmp_path):
    forked(2, evaluate_and_train, tmp_path)
    (first, logs), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in "01")
    assert same(first, second) and logs == 2
    assert not same(first, weights(model_of()))


class Stream(IterableDataset):
    """Rows of unequal lengths, of which nobody knows the number beforehand."""

    def __init__(self, count):
        self.rows = rows(count, 1)

    def __iter__(self):
        yield from self.rows


def evaluate_streams(folder, counts, **options):
    """What evaluations of streams of so many rows report, and how many tokens a run over the last of them learnt."""
    data = Stream(counts[-1])
    trainer = trainer_of(folder / "run", data=data, per_device_eval_batch_size=2, **options)
    figures = [trainer.evaluate(Stream(count)) for count in counts]
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save((figures, logged(trainer, "tokens_seen")), folder / f"by-{trainer.args.world_size}.pt")


def test_rows_of_a_stream_that_fill_the_last_batch_up_count_once(tmp_path):
    counts = 4, 5, 6, 7
    evaluate_streams(tmp_path, counts, max_steps=2, per_device_train_batch_size=4)
    forked(2, partial(evaluate_streams, max_steps=2), tmp_path, counts)
    (alone, seen), (together, seen_together) = (torch.load(tmp_path / f"by-{n}.pt") for n in (1, 2))
    for count, one, two in zip(counts, alone, together, strict=True):
        for name in ("eval_loss", "eval_accepted_length", "eval_accuracy_depth_1"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), (count, name)
    assert seen == seen_together


def train_in_orders(folder, rows_each):
    """What runs log, by the order of their rows, and the longest text that a checkpoint knows of."""
    found = {}
    for order in ("sequential", "group_by_length"):
        options = {"train_sampling_strategy": order, "per_device_train_batch_size": rows_each, "max_steps": 3}
        data = [
            {name: column[:3] for name, column in row.items()} if i % 4 < 2 else row for i, row in enumerate(rows(30))
        ]
        trainer = trainer_of(folder / order, data=data, save_strategy="steps", save_steps=2, **options)
        trainer.train()
        head = json.loads((folder / order / "checkpoint-2" / "config.json").read_text())
        found[order] = logged(trainer, "tokens_seen", "loss"), head["trained_length"]
    if trainer.is_world_process_zero():
        torch.save(found, folder / f"by-{trainer.args.world_size}.pt")


def test_every_order_is_that_of_one_process_and_the_longest_text_of_all_is_noted(tmp_path):
    train_in_orders(tmp_path, 4)
    forked(2, train_in_orders, tmp_path, 2)
    alone, together = (torch.load(tmp_path / f"by-{n}.pt") for n in (1, 2))
    for order, (logs, longest) in alone.items():
        assert together[order][1] == longest > 3, order
        for one, two in zip(logs, together[order][0], strict=True):
            assert two["tokens_seen"] == one["tokens_seen"] and two["loss"] == pytest.approx(one["loss"], rel=1e-4)


def train_unlogged(folder):
    """The loss of a whole run of which one step was logged last, and what train() returns of it."""
    trainer = trainer_of(folder / "run", max_steps=3, logging_steps=2, per_device_train_batch_size=1)
    output = trainer.train()
    told = trainer.state.log_history[-1]["train_loss"]
    torch.save((told, output.training_loss, output.metrics["train_loss"]), folder / f"{os.environ['RANK']}.pt")


def test_the_loss_of_a_whole_run_is_that_of_all_processes(tmp_path):
    forked(2, train_unlogged, tmp_path)
    alone = trainer_of(tmp_path / "alone", max_steps=3, logging_steps=2).train()
    told = [each for rank in "01" for each in torch.load(tmp_path / f"{rank}.pt")]
    assert told == pytest.approx([alone.training_loss] * 6, rel=1e-4)


def test_sums_of_processes_that_are_no_more_are_not_taken_over(tmp_path):
    two, one = Writers(2, 4, "ddp"), Writers(1, 4, "no")
    for process in (1, 0):
        Unlogged([{"tokens": [process]}], 2.0 + process, 3).save(str(tmp_path), process, two)
    assert Unlogged.load(str(tmp_path), 1, 2) == Unlogged([{"tokens": [1]}], 3.0, 3)
    assert Unlogged.load(str(tmp_path), 0, 1) == Unlogged([{"tokens": [0]}, {"tokens": [1]}], 2.5, 3)
    assert Unlogged.load(str(tmp_path), 2, 3) == Unlogged([], 2.5, 3)
    Unlogged([{"tokens": [5]}], 1.0, 4).save(str(tmp_path), 0, one)
    assert Unlogged.load(str(tmp_path), 0, 2) == Unlogged([{"tokens": [5]}], 1.0, 4)
    assert Unlogged.load(str(tmp_path), 1, 2) == Unlogged([], 1.0, 4)


@pytest.mark.parametrize(
    ("run", "written", "message"),
    [
        (Writers(2, 4, "zero2"), Writers(2, 4, "zero2"), None),
        (Writers(1, 4, "no"), Writers(2, 4, "ddp"), None),
        (Writers(1, 4, "no", "9 rows", 5), Writers(1, 4, "no", None, 5), None),
        (Writers(4, 4, "fsdp2"), Writers(2, 4, "fsdp2"), None),
        (Writers(4, 4, "zero3"), Writers(2, 4, "zero3"), None),
        (Writers(2, 4, "ddp"), Writers(2, 4, "zero2"), "'zero2', whose optimizer state one of the kind 'ddp' cannot"),
        (Writers(2, 4, "fsdp2"), Writers(2, 4, "ddp"), "'ddp', whose optimizer state one of the kind 'fsdp2' cannot"),
    ],
)
def test_what_another_launcher_wrote_is_read_or_refused(run, written, message):
    if message is None:
        run.refuse(written, Path("checkpoint-3"))
    else:
        with pytest.raises(ResumeError, match=message) as refused:
            run.refuse(written, Path("checkpoint-3"))
        assert "init_from=checkpoint-3" in str(refused.value)
