"""Under FSDP2 and ZeRO-3 the first process alone loads the base, and heads train as on one process."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.training.run import prepare
from tests.support.fsdp2 import configured, fsdp2_on_cpu
from tests.support.saved_features import HEADS, material, recipe
from tests.support.training_runs import forked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"))


def train(runs):
    """Train the runs, by name → a recipe, under FSDP2 by as many processes as call this."""
    with configured(), fsdp2_on_cpu():
        for name, recipe in runs.items():
            run = prepare(recipe)
            model = run.trainer.model
            run.train()
            assert all(isinstance(p, DTensor) for p in run.trainer.model.parameters())


def test_heads_of_every_kind_train_as_on_one_process(folder, tmp_path):
    one, two = (
        {kind: recipe(folder, tmp_path / f"{n}" / kind, kind, per_device_train_batch_size=2 // n) for kind in HEADS}
        for n in (1, 2)
    )
    for each in one.values():
        prepare(each).train()
    forked(2, train, two)
    for kind in HEADS:
        expected, got = (json.loads((tmp_path / n / kind / "trainer_state.json").read_text())["log_history"] for n in "12")
        for entry, other in zip(expected, got, strict=True):
            for name in entry.keys() & {"loss", "accepted_length", "eval_loss", "eval_accepted_length"}:
                assert other[name] == pytest.approx(entry[name], rel=1e-3), (kind, entry["step"], name)
        whole, saved = (load_file(tmp_path / n / kind / "model.safetensors") for n in "12")
        assert whole.keys() == saved.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{kind}: {name}")
