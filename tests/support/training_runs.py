"""Training runs on a tiny base, in this process, in forks of it or started by a launcher, and what they leave."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.support.killable_fork import fork
from tests.support.paths import ROOT

RUNNING_UNDER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_FSDP")


def overrides(material, output, batch_size, *more):
    return [
        f"base={material / 'base'}", f"data.train={material / 'train.jsonl'}", f"data.eval={material / 'eval.jsonl'}",
        "data.eval_fraction=0", "data.split=train", "data.max_length=32", "base_dtype=float32", "head.steps=2",
        "head.draft_vocab_size=60", "head.anchors=3", f"training.output_dir={output}", "training.bf16=false",
        "training.max_steps=4",
        f"training.per_device_train_batch_size={batch_size}", "training.per_device_eval_batch_size=2",
        "training.gradient_accumulation_steps=2", "training.learning_rate=1e-2", "training.logging_steps=1",
        "training.eval_steps=4", "training.save_steps=4", "training.disable_tqdm=true", "training.use_cpu=true",
        "parity.prompts=2", *more,
    ]  # fmt: skip


def run_module(command, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in RUNNING_UNDER}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, timeout=540,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def launched(processes, script, *arguments):
    clean = {name: value for name, value in os.environ.items() if name not in RUNNING_UNDER}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
         str(ROOT / "tests" / "workers" / script), *map(str, arguments)],
        capture_output=True, text=True, timeout=540,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def forked(processes, work, *arguments):
    """work(*arguments) in forks of this process that are the ranks of one gloo group; it returns None or 0.

    As a launcher starts them, but for what new processes take longest over: importing torch and transformers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    running = set()
    for rank in map(str, range(processes)):
        if (child := fork()) == 0:
            code = 1
            try:
                os.environ.update(group | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(processes)})
                for state in (AcceleratorState, GradientState, PartialState):  # this process's own
                    state._reset_state()
                code = work(*arguments) or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        running.add(child)
    end, failed = time.monotonic() + 300, False
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.remove(child)
                failed |= status != 0
        if failed or time.monotonic() > end:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            pytest.fail("a process failed (see stderr) or did not end")
        time.sleep(0.02)


def assert_same_run(whole, log, weights):
    expected, got = ([entry for entry in history if "loss" in entry] for history in (whole.state.log_history, log))
    assert [entry["step"] for entry in expected] == [2, 4, 6]
    for one, two in zip(expected, got, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            if name in ("cpu_seconds", "accepted_length_error"):  # the latter from how the batches differ
                continue
            assert two[name] == pytest.approx(value, rel=1e-4), name  # float32 sums in another order, through AdamW
    for name, tensor in whole.model.head.state_dict().items():
        torch.testing.assert_close(weights[f"head.{name}"], tensor, rtol=1e-3, atol=1e-4)
