"""Under DeepSpeed every kind of head trains as on one process, whatever rows each of its processes has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heads_by_two import HEADS, trained
from safetensors.torch import load_file
from test_launch import RUNNING_UNDER

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By head: the log of one process, and the file it saved."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: (trained(name, folder / name, 1).state.log_history, folder / name) for name in HEADS}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_every_kind_of_head_trains_under_zero_as_on_one_process(stage, alone, tmp_path):
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    clean = {name: value for name, value in os.environ.items() if name not in RUNNING_UNDER}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(HERE / "heads_by_two.py"), stage, str(tmp_path)],
        capture_output=True, text=True, timeout=540,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (log, folder) in alone.items():
        for expected, got in zip(log, json.loads((tmp_path / f"{name}.json").read_text()), strict=True):
            for key in expected.keys() & {"loss", "grad_norm", "accepted_length", "eval_loss", "eval_accepted_length"}:
                assert got[key] == pytest.approx(expected[key], rel=1e-4), f"{name}: {key} of step {expected['step']}"
        whole, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / name / "model.safetensors")
        assert whole.keys() == saved.keys()
        for part, tensor in whole.items():
            torch.testing.assert_close(saved[part], tensor, rtol=1e-3, atol=1e-4, msg=f"{name}: {part}")
