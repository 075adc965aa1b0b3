"""A run that is killed, stopped or left alone says so, keeps what it had saved, and resumes from there unchanged."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from specheads.training.errors import TrainingStopped, last_finished, resume_hint
from specheads.training.run import prepare
from tests.support.heads_on_disk import in_new_process
from tests.support.killable_fork import fork
from tests.support.paths import ROOT
from tests.support.resumable_runs import losses, options
from tests.support.training_runs import RUNNING_UNDER
from tests.workers.heads_by_two import ZERO

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


def test_a_checkpoint_that_is_written_over_is_unfinished_until_it_is_whole(folder, tmp_path, monkeypatch):
    prepare(options(tmp_path, folder, max_steps=2)).train()
    again = prepare(options(tmp_path, folder, max_steps=2, resume_from_checkpoint=None))
    monkeypatch.setattr(type(again.trainer), "save_model", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    if (child := fork()) == 0:
        again.train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert last_finished(tmp_path) is None


class DiesSoon(TrainerCallback):
    """After the first checkpoint from `step` on, this process has `seconds` to live: then the kernel ends it, on a
    fast machine after the next checkpoint."""

    def __init__(self, step, seconds):
        self.step, self.seconds = step, seconds

    def on_save(self, args, state, control, **kwargs):
        if state.global_step < self.step:
            return
        if not self.seconds:
            signal.raise_signal(signal.SIGALRM)  # without a handler: its default is to terminate
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        self.seconds = 0


def killed_again_and_again(folder, output, times):
    """In a process of its own: train, die at a random moment after some step, resume, …, and once to the end.

    What each one left goes to a file: the standard output of one that dies may end in the middle of a line.
    """
    folder, output = Path(folder), Path(output)
    draw, step = random.Random(7), 0
    prepare(options(folder / "warm", folder, save_steps=1, max_steps=12)).train()
    with (folder / "left").open("w", buffering=1) as left:
        for _ in range(int(times)):
            step += draw.randint(1, 3)
            seconds = draw.uniform(0.001, 0.06)  # a step with its checkpoint takes about 0.06 seconds
            if (child := fork()) == 0:
                run = prepare(options(output, folder, save_steps=1, max_steps=12))
                run.trainer.add_callback(DiesSoon(step, seconds))
                run.train()
                os._exit(0)
            died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            left.write(f"{signal.Signals(-died).name} {last_finished(output).name.removeprefix('checkpoint-')}\n")
    prepare(options(output, folder, save_steps=1, max_steps=12)).train()


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(folder):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.training.test_errors_killed import killed_again_and_again; killed_again_and_again(*sys.argv[2:])"
    )
    output = folder / "killed"
    in_new_process(script, str(ROOT), str(folder), str(output), "4")
    died, left = zip(*(line.split() for line in (folder / "left").read_text().splitlines()), strict=True)
    assert set(died) == {"SIGALRM"} and len(died) == 4
    assert sorted(map(int, left)) == list(map(int, left)) and 2 <= int(left[0]) < int(left[-1]) < 12
    assert losses(output) == losses(folder / "warm")
    whole, resumed = (load_file(path / "model.safetensors") for path in (folder / "warm", output))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def two_processes(recipe, file, sharded=False):
    """A launcher that has started them, as a user's shell does. sharded: under FSDP2."""
    file.write_text(recipe.to_yaml())
    clean = {name: value for name, value in os.environ.items() if name not in RUNNING_UNDER}
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train/heads.py", str(file)]
    if sharded:
        config = file.with_name("fsdp2.yaml")
        shipped = (ROOT / "recipes" / "accelerate" / "fsdp2.yaml").read_text()
        config.write_text(shipped.replace("gpu_ids: all", "use_cpu: true"))
        command = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
        command += ["--main_process_port", "0", "tests/workers/fsdp2_on_cpu.py", str(file)]
    return subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
        stderr=file.with_suffix(".err").open("a"),
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def kill_after(launcher, output, step, seconds, whom):
    """kill -9, so many seconds after checkpoint `step` was begun: every process, launcher included, or one rank."""
    while not (output / f"checkpoint-{step}").exists():
        assert launcher.poll() is None, "ended before it could be killed"
        time.sleep(0.005)
    time.sleep(seconds)
    workers = {process.environ()["RANK"]: process for process in psutil.Process(launcher.pid).children()}
    assert set(workers) == {"0", "1"}
    for process in [psutil.Process(launcher.pid), *workers.values()] if whom == "all" else [workers[whom]]:
        process.kill()
    assert launcher.wait(timeout=90) != 0
    psutil.wait_procs(list(workers.values()), timeout=30)
    assert not any(worker.is_running() for worker in workers.values())


def logs_of(output):
    """What it logged of its steps: sums over both processes, of which a resumed run has a part from before."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in entry.items() if k != "cpu_seconds"} for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_two_processes_killed_at_random_moments_end_as_the_uninterrupted_ones(kind, folder, tmp_path):
    more, run = {}, partial(two_processes, sharded=kind == "fsdp2")
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
        more["deepspeed"] = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], "stage": int(kind[-1])}}
    whole, output = tmp_path / "whole", tmp_path / "killed"
    saving = {"save_steps": 1, "max_steps": 12, "per_device_train_batch_size": 1, "logging_steps": 2, **more}
    assert run(options(whole, folder, **saving), tmp_path / "whole.yaml").wait(timeout=300) == 0
    draw, left = random.Random(3), []
    for step, whom in ((2, "all"), (5, "1"), (8, "0")):
        launcher = run(options(output, folder, **saving), tmp_path / "killed.yaml")
        kill_after(launcher, output, step, draw.uniform(0, 0.15), whom)
        left.append(int(last_finished(output).name.removeprefix("checkpoint-")))
    assert 1 <= left[0] < left[1] < left[2] < 12
    assert run(options(output, folder, **saving), tmp_path / "killed.yaml").wait(timeout=300) == 0
    logs = [logs_of(path) for path in (whole, output)]
    assert logs[0] == logs[1] and len(logs[0]) == 6
    expected, resumed = (load_file(path / "model.safetensors") for path in (whole, output))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())


# --- asked to stop ---


def started(tmp_path, folder, program, **training):
    """A real process of its own that trains, once it has taken a step or three."""
    run = options(tmp_path / "out", folder, max_steps=100_000, eval_strategy="no", logging_steps=1, **training)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    errors, lines = tmp_path / "errors.txt", tmp_path / "lines.txt"
    process = subprocess.Popen(
        [sys.executable, *program, str(tmp_path / "run.yaml")], cwd=ROOT, text=True, stdout=lines.open("w"),
        stderr=errors.open("w"), env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while " 3/100000 " not in lines.read_text() and last_finished(tmp_path / "out") is None:
        assert process.poll() is None, errors.read_text()[-2000:]
        time.sleep(0.1)
    return process, errors


def stopped_by(process, errors, number):
    process.send_signal(number)
    try:
        return process.wait(timeout=60), errors.read_text().splitlines()
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "name"),
    [(["-m", "specheads", "train"], "specheads"), (["train/heads.py"], "train/heads.py")],
)
def test_ctrl_c_says_at_which_step_it_stopped_and_how_to_resume(folder, tmp_path, program, name):
    code, said = stopped_by(*started(tmp_path, folder, program), signal.SIGINT)
    last = last_finished(tmp_path / "out")
    assert code == 130 and "Traceback" not in "".join(said)
    found = re.fullmatch(
        rf"{name}: stopped at step (\d+); checkpoint (.*); resume with the same command and "
        r"training.resume_from_checkpoint=auto", said[-1],
    )  # fmt: skip
    assert found is not None, said[-1]
    assert Path(found[2]) == last and 0 <= int(found[1]) - int(last.name.rpartition("-")[2]) <= 2


@pytest.mark.slow
def test_a_sigterm_says_so_too_and_that_nothing_was_saved_where_nothing_was(folder, tmp_path):
    code, said = stopped_by(*started(tmp_path, folder, ["train/heads.py"], save_strategy="no"), signal.SIGTERM)
    assert code == 143, said
    assert re.fullmatch(r"train/heads.py: stopped at step \d+; no checkpoint was saved yet \(.*\)", said[-1])


@pytest.fixture(autouse=True)
def interruptible():
    """A suite that a shell started in the background ignores SIGINT, and so would the programs it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(TrainerCallback):
    """A signal at one step, and a second while the first takes effect, as a terminal and a launcher send them."""

    def __init__(self, step):
        self.step, self.undisturbed = step, False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                self.undisturbed = True


def interrupted(recipe, step):
    run = prepare(recipe)
    run.trainer.add_callback(callback := Interrupted(step))
    with pytest.raises(TrainingStopped) as stopped:
        run.train()
    assert callback.undisturbed
    return str(stopped.value)


def test_a_stopped_run_resumes_from_its_own_checkpoint_and_not_from_that_of_an_earlier_run(folder, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    assert interrupted(options(tmp_path, folder), 5).startswith(
        f"stopped at step 5; checkpoint {tmp_path}/checkpoint-4;"
    )
    again = {"resume_from_checkpoint": None, "save_strategy": "no"}
    assert "stopped at step 2; no checkpoint" in interrupted(options(tmp_path, folder, **again), 2)
    anew = interrupted(options(tmp_path, folder, resume_from_checkpoint=None), 3)
    assert f"checkpoint {tmp_path}/checkpoint-2; resume" in anew
    assert anew.endswith(f"training.resume_from_checkpoint={tmp_path}/checkpoint-2")  # auto would be the other run's
    assert prepare(options(tmp_path, folder)).train()["train_loss"] > 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_saves_the_head_alone_says_how_to_begin_from_it(folder, tmp_path):
    """Resuming would be refused: there is no optimizer."""
    alone = {"resume_from_checkpoint": None, "save_only_model": True}
    said, saved = interrupted(options(tmp_path, folder, **alone), 3), tmp_path / "checkpoint-2"
    assert said.startswith(f"stopped at step 3; checkpoint {saved}, ") and "resume" not in said
    assert said.endswith(f"head=null init_from={saved}") and resume_hint(tmp_path).endswith(said.partition("); ")[2])
    wanted = options(tmp_path / "anew", folder, max_steps=1, resume_from_checkpoint=None)
    begun = prepare(replace(wanted, head=None, init_from=str(saved)))
    kept = load_file(saved / "model.safetensors")
    assert all(torch.equal(kept[f"head.{name}"], t) for name, t in begun.trainer.model.head.state_dict().items())


# --- alone ---


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_process_whose_other_is_gone_ends_with_an_error_in_bounded_time(how, folder, tmp_path):
    """One that was killed, and one that hangs: training.ddp_timeout bounds that."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = options(tmp_path, folder, max_steps=100_000, ddp_timeout=25, save_steps=20, eval_strategy="no")
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    command = [sys.executable, "train/heads.py", str(tmp_path / "run.yaml")]
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=(tmp_path / f"{rank}.err").open("w"),
            env={**os.environ, **known, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        while last_finished(tmp_path) is None:
            assert all(process.poll() is None for process in processes), (tmp_path / "0.err").read_text()[-2000:]
            time.sleep(0.1)
        processes[1].send_signal(how)
        began = time.monotonic()
        assert processes[0].wait(timeout=90) == 1
        assert time.monotonic() - began < 75
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (said,) = [line for line in (tmp_path / "0.err").read_text().splitlines() if line.startswith("train/heads.py: ")]
    assert "another process of this run has ended or does not answer" in said and "is whole: resume from it" in said
