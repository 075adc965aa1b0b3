"""Saved features on disk: killed, damaged, full, asked about, and written by several processes."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from specheads.training.features import extract, frozen_weights, plan, shards
from specheads.training.features.dataset import FeatureDataset
from specheads.training.features.index import INDEX, read_finished_index
from specheads.training.features.shards import FLOAT8, FeatureError, decode_states, encode_states
from tests.support.heads_on_disk import in_new_process
from tests.support.killable_fork import fork
from tests.support.paths import ROOT
from tests.support.saved_features import TAPS, dump, material
from tests.support.training_runs import run_module as launched

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def whole(folder):
    """Features that were saved in one go, into several files."""
    dump(folder, folder / "whole")
    return folder / "whole"


@pytest.fixture
def saved(whole, tmp_path):
    """A copy that may be damaged. (Beside the base as the first is, since its name is kept relative to the folder.)"""
    return shutil.copytree(whole, tmp_path / "saved")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_entry_comes_back_from_eight_bits_within_the_stated_bound():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 48, generator=generator) * torch.logspace(-6, 4, 64).unsqueeze(1)
    x[3], x[4, 1:] = 0, 0
    kept = encode_states("x", x, FLOAT8)
    assert kept["x"].dtype == FLOAT8 and kept["x.scale"].shape == (64,)
    back, largest = decode_states(kept["x"], kept["x.scale"]).float(), x.abs().amax(-1, keepdim=True)
    bound = torch.maximum(x.abs() / 16, largest / 448 / 1024) * (1 + 2**-7)  # bfloat16 rounds once more
    assert ((back - x).abs() <= bound).all()
    assert (back.abs() <= largest * 1.01).all() and back[3].abs().max() == 0
    assert torch.isfinite(decode_states(*encode_states("x", x * 1e30, FLOAT8).values())).all()


# --- killed ---


def killed_again_and_again(folder, output, times):
    """In a process of its own: start, die at a random moment after some file, start again, …, and once to the end.

    What there was each time goes to a file: the standard output of one that dies may end in the middle of a line.
    """
    folder, output = Path(folder), Path(output)
    draw, count, real = random.Random(5), 0, extract.write
    with (folder / "left").open("w", buffering=1) as left:
        for _ in range(int(times)):
            count += draw.randint(1, 3)
            seconds = draw.uniform(0.001, 0.03)
            if (child := fork()) == 0:

                def slowly(*given, count=count, seconds=seconds):
                    if len(list(output.glob("*.safetensors"))) >= count and not any(
                        signal.getitimer(signal.ITIMER_REAL)
                    ):
                        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default is to terminate
                    time.sleep(0.02)
                    real(*given)

                extract.write = slowly
                dump(folder, output)
                os._exit(0)
            died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            left.write(f"{signal.Signals(-died).name} {len(list(output.glob('*.safetensors')))}\n")
    dump(folder, output)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_resumes_to_the_same_files_bit_for_bit(folder, whole):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.training.test_features_disk import killed_again_and_again; killed_again_and_again(*sys.argv[2:])"
    )
    output = folder / "killed"
    in_new_process(script, str(ROOT), str(folder), str(output), "3")
    died, counts = zip(*(line.split() for line in (folder / "left").read_text().splitlines()), strict=True)
    assert set(died) == {"SIGALRM"} and len(died) == 3
    counts = [int(count) for count in counts]
    assert counts == sorted(counts) and counts[0] < counts[-1]  # what is there stays
    assert contents(output) == contents(whole)


@pytest.mark.parametrize("step", ["touch", "save_file", "fsync", "replace"])
def test_a_run_killed_at_any_step_of_a_write_leaves_files_that_are_whole(step, folder, whole):
    output = folder / f"killed at {step}"
    if (child := fork()) == 0:
        owner = {"touch": Path, "save_file": shards, "fsync": os, "replace": os}[step]
        real, calls = getattr(owner, step), iter(range(1000))

        def dying(*args, **kwargs):
            if next(calls) == {"touch": 4, "save_file": 3, "fsync": 4, "replace": 4}[step]:
                if step == "save_file":
                    Path(args[1]).write_bytes(b"half of it")
                    Path(args[1]).with_name(".tmpR4nD0m").touch()  # as safetensors does
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, step, dying)
        dump(folder, output)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    there = contents(output)
    made = {name for name in there if name.startswith(("train", "eval"))}
    assert made and all(there[name] == contents(whole)[name] for name in made)
    with pytest.raises(FeatureError, match="is not finished: run the command"):
        read_finished_index(output)
    dump(folder, output)
    assert contents(output) == contents(whole)


@pytest.mark.parametrize("name", ["base/kept.safetensors", "train-00000.safetensors", INDEX])
def test_what_a_killed_write_left_is_removed(name, folder, whole):
    output = folder / f"left of {Path(name).name}"
    file = output / name
    if name != INDEX:  # which is the first file of all
        shutil.copytree(whole, output)
        file.unlink()
    for left in (file.with_name(f".{file.name}.0123abcd"), file.with_name(f".{file.name}.4567cdef")):
        left.mkdir(parents=True)
        (left / ".tmpR4nD0m").touch()
    dump(folder, output)
    assert contents(output) == contents(whole) and not list(output.rglob(".*"))


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(folder, whole):
    output = folder / "two"
    command = ["accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu.yaml", "--main_process_port", "0"]
    done = launched(
        [*command, "train/features.py", "recipes/medusa.yaml", "--output", str(output), "--taps", "1,2,4", "--yes",
         "--batch_size", "2", "--shard_mb", "0.012", f"base={folder / 'base'}", "base_dtype=float32",
         f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'eval.jsonl'}", "data.eval_fraction=0",
         "data.split=train", "data.max_length=24", "training.bf16=false", "launch.processes=2"]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("saved ") == 1
    assert contents(output) == contents(whole)


# --- damaged ---


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path, at=40):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut short": ("train-00001.safetensors", cut, "train-00001.safetensors is damaged"),
    "header changed": ("train-00001.safetensors", flip, "train-00001.safetensors is damaged"),
    "missing": ("train-00001.safetensors", Path.unlink, "train-00001.safetensors is missing"),
    "another in its place": (
        "train-00001.safetensors", lambda path: shutil.copy(path.with_name("train-00000.safetensors"), path),
        "train-00001.safetensors is damaged or not the one",
    ),
    "index cut short": ("index.json", cut, "index.json is damaged"),
    "index missing": ("index.json", Path.unlink, "has no index.json"),
    "index of another version": (
        "index.json", lambda path: path.write_text(path.read_text().replace('"format": 2', '"format": 9')),
        "index.json has format 9, and this version reads 2",
    ),
    "base cut short": ("base/kept.safetensors", cut, "kept.safetensors is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_that_names_the_file(damage, saved):
    name, spoil, message = DAMAGES[damage]
    spoil(saved / name)
    before = contents(saved)
    with pytest.raises(FeatureError, match=message) as caught:
        FeatureDataset(saved, TAPS)
    assert "\n" not in str(caught.value) and any(word in str(caught.value) for word in ("again", "give a folder"))
    assert contents(saved) == before


@pytest.mark.parametrize("at", [-1, -700])
def test_a_bit_that_changed_among_the_features_is_found_when_they_are_read(at, saved):
    flip(saved / "train-00001.safetensors", at)
    rows = FeatureDataset(saved, TAPS)
    assert len(list(rows.labels())) == len(rows)  # the header, the sizes and the other files are whole
    with pytest.raises(FeatureError, match=r"train-00001\.safetensors is damaged: its contents have checksum .*again"):
        [rows[i] for i in range(len(rows))]
    assert rows[0]["features"].shape[1] > 0
    flip(saved / "train-00001.safetensors", at)
    assert [rows[i] for i in range(len(rows))]


def test_a_bit_that_changed_among_the_bases_weights_is_found(saved):
    flip(saved / "base" / "kept.safetensors", -1)
    with pytest.raises(FeatureError, match=r"kept\.safetensors is damaged: its contents have checksum"):
        frozen_weights.skeleton(saved)


def test_a_damaged_file_is_made_again_once_it_is_deleted(folder, whole):
    output = shutil.copytree(whole, folder / "again")
    cut(output / "train-00001.safetensors")
    with pytest.raises(FeatureError, match=r"train-00001\.safetensors is damaged or cut short .* delete it"):
        dump(folder, output)
    (output / "train-00001.safetensors").unlink()
    assert dump(folder, output).made == 1
    assert contents(output) == contents(whole)


def test_other_options_and_other_rows_are_refused(folder, whole):
    before = contents(whole)
    with pytest.raises(FeatureError, match=r"other options \(teacher_probs: 'hidden', not 'none'\)"):
        dump(folder, whole, teacher_probs="none")
    with pytest.raises(FeatureError, match="dtype: 'float32', not 'bfloat16'"):
        dump(folder, whole, dtype="bfloat16", shard_mb=0.006)
    other = folder / "other.jsonl"
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    other.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(FeatureError, match=r"train-00000\.safetensors holds other rows"):
        dump(folder, whole, data={"train": str(other)})
    first = json.loads(lines[0])
    first["labels"][-1] = -100
    other.write_text("".join([json.dumps(first) + "\n", *lines[1:]]))
    with pytest.raises(FeatureError, match=r"train-00000\.safetensors holds other rows .*\(in supervised\)"):
        dump(folder, whole, data={"train": str(other)})
    (folder / "things").mkdir()
    (folder / "things" / "notes.txt").touch()
    with pytest.raises(FeatureError, match="holds something other than saved features"):
        dump(folder, folder / "things")
    assert contents(whole) == before


# --- full ---


def test_a_full_disk_is_an_error_that_loses_nothing(folder, whole, monkeypatch):
    output, real, calls = folder / "full", shards.save_file, iter(range(100))

    def full(tensors, path, *args, **kwargs):
        if next(calls) == 3:
            Path(path).write_bytes(b"what found room")
            raise shards.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", full)
        with pytest.raises(
            FeatureError, match=r"train-00002\.safetensors could not be written .* No space left .* resumes there"
        ):
            dump(folder, output)
    there = contents(output)
    assert {name for name in there if "train" in name} == {f"train-0000{i}.safetensors" for i in (0, 1)}
    dump(folder, output)
    assert contents(output) == contents(whole)


def test_the_size_is_told_before_anything_is_written(folder, whole, tmp_path, monkeypatch):
    told = []
    with pytest.raises(FeatureError, match="nothing was saved"):
        dump(folder, tmp_path / "no", ask=lambda plan: told.append(plan) and False)
    assert not (tmp_path / "no").exists()
    tokens = sum(
        len(row["labels"]) for split in ("train", "eval") for row in FeatureDataset(whole, TAPS, split).labels()
    )
    states = 3 * 32 * 4 + 13  # three taps, of which one is the last hidden state, and what is known of a token
    kept = (whole / "base" / "kept.safetensors").stat().st_size
    told_of_base = frozen_weights.kept_bytes(AutoConfig.from_pretrained(whole / "base"), torch.float32)
    assert kept - 2000 <= told_of_base <= kept
    assert told[0].startswith(
        f"{tokens:,} tokens, {states:,} bytes each, and {plan.size_text(told_of_base)} of the base"
    )
    size = sum(path.stat().st_size for path in whole.glob("*.safetensors"))
    headers = 1000 * len(list(whole.glob("*.safetensors")))
    assert tokens * states <= size <= tokens * states + headers
    monkeypatch.setattr(plan, "free_bytes", lambda folder: told_of_base + tokens * states - 1)
    with pytest.raises(FeatureError, match="too little room"):
        dump(folder, tmp_path / "no")
    with pytest.raises(FeatureError, match=r"is no folder|other options|too little room"):
        dump(folder, whole, dtype="bfloat16")
    saved = dump(folder, whole)  # all is there, so that no room is needed
    assert saved.bytes == size + kept
