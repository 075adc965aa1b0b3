"""Training runs on a tiny base, in this process or started by a launcher, and what they leave."""

import os
import subprocess
import sys

import pytest
import torch

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
        "training.eval_steps=4", "training.save_steps=4", "training.disable_tqdm=true", "training.use_cpu=true", *more,
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


def assert_same_run(whole, log, weights):
    expected, got = ([entry for entry in history if "loss" in entry] for history in (whole.state.log_history, log))
    assert [entry["step"] for entry in expected] == [2, 4, 6]
    for one, two in zip(expected, got, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-4), name  # float32 sums in another order, through AdamW
    for name, tensor in whole.model.head.state_dict().items():
        torch.testing.assert_close(weights[f"head.{name}"], tensor, rtol=1e-3, atol=1e-4)
