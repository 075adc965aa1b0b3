"""Claims about specheads/models/checkpoint.py: a save that dies leaves the old checkpoint or none, and no litter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from specheads import CheckpointError, SpecModel, load_head
from specheads.models import checkpoint
from tests.support.heads_on_disk import FILES, contents, same, trained
from tests.support.killable_fork import fork
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.usefixtures("offline")

STEPS = [
    (Path, "touch"), (checkpoint, "save_file"), (Path, "chmod"), (os, "fsync"), (os, "replace"), (Path, "write_text"),
]  # fmt: skip


def failing_at(step: int, fail, half: bool):
    """Replace what save() writes with, so that `fail()` comes before its call number `step`, or half-way through."""
    calls = iter(range(10_000))

    def wrapped(function):
        def call(*args, **kwargs):
            if next(calls) == step:
                if half and function.__name__ in ("save_file", "write_text"):
                    function(*args, **kwargs)
                    path = args[1] if function.__name__ == "save_file" else args[0]
                    os.truncate(path, os.path.getsize(path) // 2)
                fail()
            return function(*args, **kwargs)

        return call

    return [(owner, name, wrapped(getattr(owner, name))) for owner, name in STEPS]


def before_and_after(folder):
    """Two heads of one base, told apart by their options as well; the first of them saved."""
    base = tiny_llama()
    old, new = trained(base, "medusa", 1, num_heads=2), trained(base, "medusa", 2, num_heads=3)
    old.save_pretrained(folder / "old")
    return base, old, new


def killed_at_every_step(folder):
    """For each step of a save, fork, die there, and say what is left of the checkpoint: its start, whether the step was
    half done, the exit status, what is left."""
    base, old, new = before_and_after(folder)
    for half in (False, True):
        for start in ("old", "none"):
            step, status = 0, -1
            while status != 0:
                target = folder / f"{start}-{half}-{step}"
                if start == "old":
                    shutil.copytree(folder / "old", target)
                if (child := fork()) == 0:
                    try:
                        for owner, name, function in failing_at(step, lambda: os._exit(9), half):
                            setattr(owner, name, function)
                        new.save_pretrained(target)
                        os._exit(0)
                    finally:
                        os._exit(1)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                try:
                    model = load_head(base, target)
                    left = "old" if same(model, old) else "new" if same(model, new) else "broken"
                    wanted = old if left == "old" else new
                    left = left if model.head.config == wanted.head.config else "mixed"
                except CheckpointError as error:
                    left = "none" if "has no model.safetensors" in str(error) else f"refused: {error}"
                yield start, half, status, left
                new.save_pretrained(target)  # which removes what the killed save left
                assert {path.name for path in target.iterdir()} <= FILES
                step += 1


def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_none(tmp_path):
    seen = list(killed_at_every_step(tmp_path))
    for start in ("old", "none"):
        for half in (False, True):
            states = [left for s, h, status, left in seen if (s, h) == (start, half) and status == 9]
            assert len(states) == 10, "two files, each: made, written, given its mode, flushed, put in place"
            # up to the replacing of the weights file nothing has changed; from then on all of it has
            assert states == [start] * 5 + ["new"] * 5
    assert sum(status == 0 and left == "new" for *_, status, left in seen) == 4


def test_a_save_that_fails_leaves_no_litter(tmp_path, monkeypatch):
    base, _, new = before_and_after(tmp_path)
    whole = contents(tmp_path / "old")

    def full():
        raise OSError(28, "No space left on device")

    for half in (False, True):
        for start in ("old", "none"):
            for step in range(10):
                target = tmp_path / f"{start}-{half}-{step}"
                if start == "old":
                    shutil.copytree(tmp_path / "old", target)
                with monkeypatch.context() as patch:
                    for change in failing_at(step, full, half):
                        patch.setattr(*change)
                    with pytest.raises(OSError, match="No space left"):
                        new.save_pretrained(target)
                assert set(contents(target)) <= FILES
                if step < 5:
                    assert contents(target) == (whole if start == "old" else {})
                else:
                    assert same(load_head(base, target), new)
                new.save_pretrained(target)  # and with room again it goes through
                assert same(load_head(base, target), new)


@pytest.mark.parametrize("loader", [SpecModel.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_new_weights_beside_an_old_config_are_the_new_checkpoint(named, tmp_path, loader):
    old, new = trained(named, "medusa", 1, num_heads=2), trained(named, "eagle", 2)
    old.save_pretrained(tmp_path / "a")
    new.save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    restored = loader(tmp_path / "a")
    assert same(restored, new) and restored.head.config == new.head.config
