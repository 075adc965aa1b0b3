"""A run that cannot continue says why in one line, keeps what it had saved, and resumes from there unchanged."""

import contextlib
import json
import resource
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from specheads.models import checkpoint
from specheads.training import errors as faults
from specheads.training.build import resume_point
from specheads.training.distributed.resume import ResumeError
from specheads.training.errors import TrainingError, is_finished, last_finished
from specheads.training.run import prepare
from tests.support.resumable_runs import losses, options
from tests.support.saved_features import dump, recipe

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


def weights(run):
    return {name: tensor.clone() for name, tensor in run.trainer.model.head.state_dict().items()}


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(folder):
    prepare(options(folder / "uninterrupted", folder)).train()
    return folder / "uninterrupted"


# --- no number ---


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.sampled(3)
def test_a_loss_or_gradient_that_is_no_number_stops_the_run_before_the_step(
    what, value, folder, tmp_path, uninterrupted
):
    run = prepare(options(tmp_path / "out", folder))
    real, calls, before = run.trainer.model.head.loss, iter(range(100)), {}

    class Spoilt(torch.autograd.Function):
        """Itself forward; backward no number."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * value

    def spoilt(batch):
        loss, terms = real(batch)
        if not run.trainer.model.training or next(calls) != 3:
            return loss, terms
        before.update(weights(run), saved=files(tmp_path / "out" / "checkpoint-2"))
        return (loss * value if what == "loss" else Spoilt.apply(loss)), terms

    run.trainer.model.head.loss = spoilt
    with pytest.raises(TrainingError, match=rf"step 4: the {what} is (nan|-?inf), .*checkpoint-2 is whole: .*=auto"):
        run.train()
    saved = before.pop("saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    assert files(tmp_path / "out" / "checkpoint-2") == saved
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]
    prepare(options(tmp_path / "out", folder)).train()
    assert losses(tmp_path / "out") == losses(uninterrupted)


# --- nothing to draft ---


def test_rows_of_which_no_draft_has_a_target_stop_the_run_before_its_first_step(folder, tmp_path):
    dump(folder, tmp_path / "saved", data={"max_length": 2})
    for source in ({"data": {"max_length": 2}}, {"features": tmp_path / "saved"}):
        with pytest.raises(ValueError, match=r"no draft has a target: .* rows of 3 tokens or more"):
            prepare(recipe(folder, tmp_path / "out", **source))
    assert prepare(recipe(folder, tmp_path / "out", data={"max_length": 3})).trainer


# --- full ---


@pytest.mark.parametrize("what", ["head", "optimizer", "state"])
@pytest.mark.sampled(2)
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half_of_a_new_one(
    what, folder, tmp_path, uninterrupted, monkeypatch
):
    run, calls = prepare(options(tmp_path / "out", folder)), iter(range(100))

    def full(real, *, only=lambda *args: True):
        def call(*args, **kwargs):
            if only(*args) and next(calls) == 1:  # at the second checkpoint
                if what == "optimizer":
                    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if what == "head":
            patch.setattr(checkpoint, "save_file", full(checkpoint.save_file))
        elif what == "optimizer":
            patch.setattr(torch, "save", full(torch.save, only=lambda state, path, *a: "optimizer" in str(path)))
        else:
            state = type(run.trainer.state)
            patch.setattr(state, "save_to_json", full(state.save_to_json))
        with pytest.raises(TrainingError, match=r"checkpoint-4 could not be written \(.*\); .*checkpoint-2 is whole"):
            run.train()
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]
    prepare(options(tmp_path / "out", folder)).train()
    assert losses(tmp_path / "out") == losses(uninterrupted)


@contextlib.contextmanager
def files_of_at_most(size):
    """In the block no file can grow above so many bytes, as on a disk that fills."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class FullFrom(TrainerCallback):
    """The disk is full from the end of a step on; `step` None: once training has ended."""

    def __init__(self, size, step, stack):
        self.size, self.step, self.stack = size, step, stack

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.stack.enter_context(files_of_at_most(self.size))

    def on_train_end(self, args, state, control, **_):
        if self.step is None:
            self.stack.enter_context(files_of_at_most(self.size))


@pytest.mark.parametrize(("what", "step"), [("optimizer.pt", 3), ("model.safetensors", 3), ("model.safetensors", None)])
def test_a_disk_that_fills_ends_the_run_in_one_line_and_loses_nothing(what, step, folder, tmp_path, uninterrupted):
    """As by a full disk, in the words of whatever version of torch writes."""
    sizes = {path.name: path.stat().st_size for path in (uninterrupted / "checkpoint-4").iterdir()}
    assert sizes["optimizer.pt"] > sizes["model.safetensors"] + 100
    run = prepare(options(tmp_path / "out", folder))
    with contextlib.ExitStack() as stack:
        run.trainer.add_callback(FullFrom(sizes[what] - 50, step, stack))
        with pytest.raises(
            TrainingError, match=r"could not be written \(.*\); once there is room, start again; .* is whole: resume"
        ) as told:
            run.train()
    assert "\n" not in str(told.value)
    left = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert left == ["checkpoint-2"] if step else len(left) > 1
    assert not list((tmp_path / "out").glob("*.safetensors*")), "no part of a head"
    prepare(options(tmp_path / "out", folder)).train()
    assert losses(tmp_path / "out") == losses(uninterrupted)
    heads = [load_file(output / "model.safetensors") for output in (tmp_path / "out", uninterrupted)]
    assert all(torch.equal(heads[0][name], tensor) for name, tensor in heads[1].items())


# --- killed ---


def test_checkpoints_that_a_crash_cut_short_are_passed_over(folder, tmp_path):
    for step, state in ((2, "{}"), (4, '{"log_history": [{"lo'), (6, None), (10, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-best").mkdir()
    assert [is_finished(tmp_path / f"checkpoint-{step}") for step in (2, 4, 6, 10)] == [True, False, False, False]
    assert last_finished(tmp_path) == tmp_path / "checkpoint-2"
    assert resume_point(options(tmp_path, folder)) == str(tmp_path / "checkpoint-2")
    assert faults.resume_hint(tmp_path / "elsewhere").startswith("no checkpoint")


def test_a_run_that_is_started_again_after_its_end_takes_no_step(folder, uninterrupted):
    before, head = losses(uninterrupted), load_file(uninterrupted / "model.safetensors")
    metrics = prepare(options(uninterrupted, folder)).train()
    assert losses(uninterrupted) == before and metrics["train_loss"] == before[-1]
    after = load_file(uninterrupted / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in head.items())
    longer = prepare(options(uninterrupted, folder, max_steps=7, save_strategy="no"))
    longer.train()
    assert losses(uninterrupted)[:-1] == before


def test_a_run_of_epochs_that_is_started_again_after_its_end_leaves_what_it_left(folder, tmp_path):
    def run(**more):
        return prepare(
            options(tmp_path, folder, max_steps=-1, num_train_epochs=1, save_strategy="epoch", **more)
        ).train()

    before = run()
    kept = json.loads((tmp_path / "config.json").read_text()), losses(tmp_path)
    again = run()
    assert again["train_loss"] == losses(tmp_path)[-1] > 0 and before["train_loss"] > 0
    assert (json.loads((tmp_path / "config.json").read_text()), losses(tmp_path)) == kept
    assert kept[0]["trained_length"] > 0
    other = options(tmp_path, folder, max_steps=-1, num_train_epochs=1)
    with pytest.raises(ResumeError, match="another head than this run's"):
        prepare(replace(other, head=replace(other.head, decay=0.5))).train()
