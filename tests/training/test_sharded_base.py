"""Under FSDP2 and ZeRO-3 the first process alone loads the base, and heads train as on one process."""

import gc
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.models.base.lora import JointConfig
from specheads.training.distributed.launch import LaunchError, kind_of
from specheads.training.distributed.sharded_base import first_loads
from specheads.training.run import prepare
from tests.support.fsdp2 import configured, fsdp2_on_cpu
from tests.support.saved_features import dump, material, recipe
from tests.support.training_runs import forked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny base and rows; in large/ one of 128 MiB in float32, in seven files in bfloat16."""
    made = material(tmp_path_factory.mktemp("material"))
    config = LlamaConfig(
        vocab_size=300, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    shutil.copytree(made, made / "large", ignore=shutil.ignore_patterns("*.safetensors"))
    LlamaForCausalLM(config).bfloat16().save_pretrained(made / "large" / "base", max_shard_size="10MB")
    return made


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Runs of `recipes`: of one process in the folder 1/, of two under FSDP2 in 2/; and in 0.json and 1.json the memory
    that each of the two needed for the large base, in parts of its size: while it was loaded, and in the end."""
    output = tmp_path_factory.mktemp("runs")
    dump(folder, folder / "features")
    data = {"eval": None, "eval_fraction": 0}
    large = recipe(folder / "large", output / "large", "medusa", None, data, max_steps=1, eval_strategy="no")
    for each in recipes(folder, output / "1", 1):
        prepare(each).train()
    forked(2, train_sharded, recipes(folder, output / "2", 2), large, output)
    return output


def recipes(folder, output, processes):
    """Of heads that read the base's embeddings, copy its output rows for a draft vocabulary, or adapt it."""
    training = {"per_device_train_batch_size": 2 // processes, "max_steps": 2}
    eagle3, parallel, medusa = (
        recipe(folder, output / kind, kind, **training) for kind in ("eagle3", "parallel", "medusa")
    )
    kept = recipe(folder, output / "features", "eagle3", features=folder / "features", **training)
    lora = JointConfig(r=2, lora_dropout=0.0, target_modules=("q_proj", "down_proj"))
    return eagle3, parallel, kept, replace(medusa, lora=lora)


def train_sharded(recipes, large, output):
    """Train by as many processes as call this."""
    with configured(), fsdp2_on_cpu():
        for each in recipes:
            run = prepare(each)
            run.train()
            assert kind_of(run.trainer.accelerator) == "fsdp2"
        measured(large, output)


def measured(large, output):
    """Train, and write the memory that this process needed until the model was sharded, and its part of the base, both
    in parts of the base's size."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    run = prepare(large)
    base = run.trainer.model.base
    size = 4 * sum(p.numel() for p in base.parameters())
    create, peak = run.trainer.create_scheduler, []  # called when the model is sharded

    def create_measured(*args, **options):
        peak.append((resident("VmHWM") - before) / size)
        return create(*args, **options)

    run.trainer.create_scheduler = create_measured
    run.train()
    parts = [p.ds_tensor if hasattr(p, "ds_tensor") else p.to_local() for p in base.parameters()]
    held = sum(part.nbytes for part in parts) / size
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps([*peak, held]))


def train_under_zero3(small, large, output):
    """The small run first, for what DeepSpeed itself takes."""
    prepare(small).train()
    measured(large, output)


def resident(field):
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def test_no_process_but_the_first_holds_the_whole_base(runs):
    refuse_whole_bases(runs, 0.75)


@pytest.mark.slow
def test_nor_does_one_under_zero3(folder, tmp_path):
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    data, training = {"eval": None, "eval_fraction": 0}, {"max_steps": 1, "eval_strategy": "no"}
    stage3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    zero = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": stage3}
    small, large = (
        recipe(made, tmp_path / made.name, "medusa", None, data, deepspeed=zero, **training)
        for made in (folder, folder / "large")
    )
    forked(2, train_under_zero3, small, large, tmp_path)
    refuse_whole_bases(tmp_path, 1.3)  # with DeepSpeed's own memory; 1.5 if each loads the base


def refuse_whole_bases(output, most):
    (first, held), (second, also_held) = (json.loads((output / f"{rank}.json").read_text()) for rank in range(2))
    assert first > 0.95 and second < most, (first, second)
    assert held == also_held == pytest.approx(0.5, abs=0.01)


def test_heads_train_as_on_one_process(runs):
    for name in ("eagle3", "parallel", "features", "medusa"):
        folders = runs / "1" / name, runs / "2" / name
        logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in folders]
        for expected, got in zip(*logs, strict=True):
            for key in expected.keys() & {"loss", "accepted_length", "eval_loss", "eval_accepted_length"}:
                assert got[key] == pytest.approx(expected[key], rel=1e-3), (name, expected["step"], key)
        whole, saved = (load_file(folder / "model.safetensors") for folder in folders)
        assert whole.keys() == saved.keys()
        for key, tensor in whole.items():
            torch.testing.assert_close(saved[key], tensor, rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")


def test_a_quantised_base_is_refused_before_it_is_loaded(folder, tmp_path):
    with configured(), pytest.raises(LaunchError, match=r"a quantised base cannot be sharded .*: use ddp, zero1 or"):
        prepare(replace(recipe(folder, tmp_path), quantize="int8"))


def test_a_launcher_that_shards_nothing_after_all_is_stopped(folder, tmp_path):
    """As on CPUs, where accelerate makes DDP of FSDP2; and without efficient loading each process loads the base."""
    with configured(), pytest.raises(LaunchError, match=r"environment asks for .* 'fsdp2', but this run has 'no'"):
        prepare(recipe(folder, tmp_path))
    arguments = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin_args=None)
    for efficient in (True, False):
        with configured(fsdp_cpu_ram_efficient_loading=efficient):
            assert first_loads(arguments) is efficient
    given = {"fsdp_version": 2, "cpu_ram_efficient_loading": True}
    assert first_loads(SimpleNamespace(deepspeed_plugin=None, fsdp_plugin_args=given)) and not first_loads(arguments)
