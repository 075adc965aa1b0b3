"""What a run is said to take before it starts is what its model and launcher come to."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import torch

from specheads.training.build import build_model
from specheads.training.estimate import GIB, PEAKS, estimate
from specheads.training.recipe.recipe import read_recipe
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.trainers import SWITCHES
from tests.support.training_runs import overrides
from tests.training.test_recipe import SHIPPED
from train import heads


@pytest.mark.parametrize("kind", [path.stem for path in SHIPPED])
def test_parameters_are_those_of_the_model_that_is_trained(kind, material, tmp_path):
    options = [o for o in overrides(material, tmp_path, 2) if not o.startswith(("head.steps", "head.draft_vocab"))]
    more = ["head.draft_vocab_size=60"] if kind not in ("eagle", "mtp", "parallel") else []
    recipe = read_recipe(ROOT / "recipes" / f"{kind}.yaml", [*options, *more])
    found = estimate(recipe, device="H200")
    model = build_model(recipe, [])
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.base_parameters == sum(p.numel() for p in model.base.parameters() if not p.requires_grad)
    head = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert found.memory["head"] * GIB == pytest.approx(head) and found.memory["optimizer"] * GIB == pytest.approx(
        8 * found.trained_parameters
    )
    width = len({*model.head.layers, model.base.config.num_hidden_layers}) * 32  # of the last layer once
    assert found.disk_gb == {"bfloat16": pytest.approx(width * 2e6 / 1e9), "float8": pytest.approx(width * 1e6 / 1e9)}
    assert found.seconds > 0 and all(size > 0 for size in found.memory.values())


def test_what_a_launcher_shards_is_divided(material, tmp_path):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2))
    alone = estimate(recipe, device="H200").memory
    for kind, sharded in {
        "ddp": (), "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"),
        "zero3": ("optimizer", "gradients", "head", "base"), "fsdp2": ("optimizer", "gradients", "head", "base"),
    }.items():  # fmt: skip
        memory = estimate(recipe, 4, kind, "H200").memory
        for part, size in alone.items():
            assert memory[part] == pytest.approx(size / 4 if part in sharded else size), (kind, part)
    assert estimate(recipe, device="A100").seconds / estimate(recipe, device="H200").seconds == pytest.approx(
        PEAKS["H200"] / PEAKS["A100"]
    )
    model = build_model(recipe, [])
    layer = sum(p.numel() for p in model.base.model.layers[0].parameters())
    every = sum(p.numel() for p in model.parameters())
    gathered = {kind: estimate(recipe, 4, kind, "H200").memory.get("gathered") for kind in ("ddp", "zero3", "fsdp2")}
    assert gathered["ddp"] is None and gathered["zero3"] * GIB == pytest.approx(4 * every)
    assert gathered["fsdp2"] == pytest.approx(alone["head"] + 4 * (97 * 32 + 2 * layer) / GIB)
    assert estimate(recipe, 4, "fsdp2", "H200").loading == pytest.approx(alone["base"])
    assert estimate(recipe, 4, "ddp", "H200").memory["buckets"] == pytest.approx(alone["gradients"])
    planned = estimate(recipe, 4, "zero3", "H200").sharded_loading
    assert planned == pytest.approx(alone["base"] + 2 * alone["head"] + 4 * layer / GIB)
    assert estimate(recipe, 4, "ddp", "H200").sharded_loading is None
    for name in ("TPU", "NVIDIA L40", "NVIDIA RTX A1000"):
        with pytest.raises(ValueError, match=f"'{name}' is not known; give one of H200"):
            estimate(recipe, device=name)


@pytest.mark.parametrize("switch", SWITCHES)
def test_recomputed_activations_are_not_kept(switch, material, tmp_path):
    def activations(*more):
        recipe = read_recipe(
            ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "head.anchors=null", *more)
        )
        return estimate(recipe, device="H200").memory["activations"] * GIB

    tokens, hidden, block, attention = 2 * 32, 32, 14 * 32 + 3 * 48, 6 * 4 * 32 * 32 * 2
    # Of two passes the inputs stay and one is whole; of the only later one the attention weights.
    saved = activations() - activations(f"training.{switch}=true")
    assert saved == pytest.approx(tokens * 4 * (2 * block - (block + 2 * 2 * hidden)))
    three, less = activations("head.steps=3"), activations("head.steps=3", f"training.{switch}=true")
    assert three - less == pytest.approx(tokens * 4 * (3 * block - (block + 3 * 2 * hidden)) + attention)


def test_muon_keeps_one_moment_of_the_matrices_inside_the_head(material, tmp_path):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "training.muon=true"))
    head = build_model(recipe, []).head
    inside = sum(p.numel() for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name)
    trained = sum(p.numel() for p in head.parameters())
    assert estimate(recipe, device="H200").memory["optimizer"] * GIB == pytest.approx(8 * trained - 4 * inside)


def test_processes_are_those_of_the_recipe_unless_others_are_given_and_ddp_unless_told(material, tmp_path):
    def found(*more, **given):
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return estimate(recipe, device="H200", **given)

    assert (found().processes, found().distributed) == (1, "no")
    assert (found(processes=4).distributed, "buckets" in found(processes=4).memory) == ("ddp", True)
    asked = found("launch.processes=4", "launch.distributed=fsdp2")
    assert (asked.processes, asked.distributed) == (4, "fsdp2")
    assert (found("launch.processes=4").distributed, found("launch.processes=4", processes=2).processes) == ("ddp", 2)


def test_what_autocast_copies_and_what_a_process_takes_without_a_model(material, tmp_path):
    def memory(*more, device="H200"):
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return {name: size * GIB for name, size in estimate(recipe, device=device).memory.items()}

    trained, embedding = memory()["head"] / 4, 97 * 32
    assert "autocast" not in memory()
    assert memory("training.bf16=true")["autocast"] == pytest.approx(2 * (trained + embedding))
    assert memory("training.bf16=true", "base_dtype=bfloat16")["autocast"] == pytest.approx(2 * trained)
    here = memory(device=None)["runtime"]
    if not torch.cuda.is_available():
        assert here == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert memory()["runtime"] == pytest.approx(0.5 * GIB)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux", reason="compares the memory of a process on a CPU, by /proc"
)
def test_the_memory_of_a_run_on_the_shipped_base_is_within_a_quarter_of_what_was_said(kind, tmp_path):
    ids = torch.randint(5, 4000, (40, 192), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    # The peak of the program alone: resource usage begins with that of the process which starts it.
    program = (
        "import pathlib, re, sys; from specheads.cli import program\n"
        "status = pathlib.Path('/proc/self/status')\n"
        "try: program.main()\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+)', status.read_text())[1], file=sys.stderr)"
    )
    command = [
        sys.executable, "-c", program, "train", str(ROOT / "recipes" / "embedded" / f"{kind}.yaml"),
        f"base={ROOT / 'checkpoints' / 'base'}", f"data.train={tmp_path / 'rows.jsonl'}", "training.max_steps=4",
        f"training.output_dir={tmp_path / 'out'}", "training.eval_strategy=no", "parity.prompts=0",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    dry, run = (
        subprocess.run([*command, *more], capture_output=True, text=True, env=environment, check=True)
        for more in (["--dry-run", "--json"], [])
    )
    peak = int(run.stderr.split()[-1]) * 1024
    assert json.loads(dry.stdout)["memory_total"] == pytest.approx(peak / GIB, rel=0.25)


def test_a_quantised_base_takes_its_bits_and_a_scale_for_64_weights(material, tmp_path):
    def base(*more):
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return estimate(recipe, device="H200").memory["base"] * GIB

    layers = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)  # q and o, k and v, the three of the MLP
    assert base() - base("load_in_4bit=true") == pytest.approx(layers * (4 - 0.5 - 1 / 64))
    assert base() - base("load_in_8bit=true") == pytest.approx(layers * (4 - 1))


def test_time_is_the_arithmetic_of_the_docs(material, tmp_path):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "head.anchors=null"))
    found, head = estimate(recipe, device="H200"), build_model(recipe, []).head
    own, rest = head.lm_head.weight.numel(), sum(p.numel() for p in head.parameters()) - head.lm_head.weight.numel()
    # Two steps, of which each applies the block, the fusing layer and the output matrix.
    operations = 2 * found.base_parameters + 6 * 2 * rest + 6 * 2 * own
    assert found.seconds == pytest.approx(1e6 * operations / (0.4 * 989e12))
    with pytest.raises(ValueError, match="processes=0"):
        estimate(recipe, 0)


def test_a_dry_run_prints_and_starts_nothing(material, tmp_path, capsys):
    options = overrides(material, tmp_path / "out", 2)
    recipe = str(ROOT / "recipes" / "eagle3.yaml")
    assert (
        heads.main(
            [recipe, *options, "--dry-run", "launch.processes=8", "launch.distributed=fsdp2", "--device", "H100"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "whole in each process" in said and "by formula, not built" in said
    assert "memory of each of 8 processes (fsdp2)" in said and "on 8 × H100" in said and not (tmp_path / "out").exists()
    code, out, _ = run(capsys, "train", recipe, *options, "--dry-run", "--json", "--device", "H200")
    assert code == 0
    record = json.loads(out)
    assert record["processes"] == 1 and record["memory_total"] == pytest.approx(sum(record["memory"].values()))
    assert not (tmp_path / "out").exists()
