"""What a run is said to take before it starts is what its model and launcher come to."""

import json
import os
import subprocess
import sys

import datasets
import psutil
import pytest
import torch

from specheads.training import estimate as code
from specheads.training.build import Budget, build_model, load_rows
from specheads.training.estimate import GIB, estimate
from specheads.training.recipe.recipe import read_recipe
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.trainers import SWITCHES
from tests.support.training_runs import overrides
from tests.training.test_recipe import SHIPPED
from train import heads


@pytest.fixture(autouse=True)
def idle_machine(request, monkeypatch):
    """A known speed, and nothing else to do."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(code, "_measure", lambda sizes: ("this CPU", 1e9 / code.PRODUCT_SHARE, 1e6))
        monkeypatch.setattr(code.psutil, "cpu_percent", lambda interval: 0.0)


@pytest.mark.parametrize("kind", [path.stem for path in SHIPPED])
def test_parameters_are_those_of_the_model_that_is_trained(kind, material, tmp_path):
    options = [o for o in overrides(material, tmp_path, 2) if not o.startswith(("head.steps", "head.draft_vocab"))]
    more = ["head.draft_vocab_size=60"] if kind not in ("eagle", "mtp", "parallel") else []
    recipe = read_recipe(ROOT / "recipes" / f"{kind}.yaml", [*options, *more])
    found = estimate(recipe)
    model = build_model(recipe, [])
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.base_parameters == sum(p.numel() for p in model.base.parameters() if not p.requires_grad)
    head = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    muon = recipe.training.get("muon", False)  # which keeps one average of a matrix, where AdamW keeps two
    matrices = sum(p.numel() for n, p in model.head.named_parameters() if p.ndim == 2 and "lm_head" not in n)
    averages = 8 * found.trained_parameters - (4 * matrices if muon else 0)
    assert found.memory["head"] * GIB == pytest.approx(head)
    assert found.memory["optimizer"] * GIB == pytest.approx(averages)
    assert found.tokens_per_second > 0 and all(size > 0 for size in found.memory.values())


def test_what_a_launcher_shards_is_divided(material, tmp_path):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2))
    alone = estimate(recipe).memory
    for kind, sharded in {
        "ddp": (), "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"),
        "zero3": ("optimizer", "gradients", "head", "base"), "fsdp2": ("optimizer", "gradients", "head", "base"),
    }.items():  # fmt: skip
        memory = estimate(recipe, 4, kind).memory
        for part, size in alone.items():
            assert memory[part] == pytest.approx(size / 4 if part in sharded else size, rel=1e-3), (kind, part)
    model = build_model(recipe, [])
    layer = sum(p.numel() for p in model.base.model.layers[0].parameters())
    every = sum(p.numel() for p in model.parameters())
    gathered = {kind: estimate(recipe, 4, kind).memory.get("gathered") for kind in ("ddp", "zero3", "fsdp2")}
    assert gathered["ddp"] is None and gathered["zero3"] * GIB == pytest.approx(4 * every)
    assert gathered["fsdp2"] == pytest.approx(alone["head"] + 4 * (97 * 32 + 2 * layer) / GIB)
    assert estimate(recipe, 4, "fsdp2").loading == pytest.approx(alone["base"])
    assert estimate(recipe, 4, "ddp").memory["buckets"] == pytest.approx(alone["gradients"])


@pytest.mark.parametrize("switch", SWITCHES)
def test_recomputed_activations_are_not_kept(switch, material, tmp_path):
    def activations(*more):
        recipe = read_recipe(
            ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "head.anchors=null", *more)
        )
        return estimate(recipe).memory["activations"] * GIB

    tokens, hidden, block = 2 * 32, 32, 14 * 32 + 3 * 48
    # Of two passes the inputs stay and one is whole.
    saved = activations() - activations(f"training.{switch}=true")
    assert saved == pytest.approx(tokens * 4 * (2 * block - (block + 2 * 2 * hidden)))
    three, less = activations("head.steps=3"), activations("head.steps=3", f"training.{switch}=true")
    assert three - less == pytest.approx(tokens * 4 * (3 * block - (block + 3 * 2 * hidden)))


def test_attention_of_a_head_takes_memory_linear_in_the_rows_length(material, tmp_path):
    def activations(length):
        more = [f"data.max_length={length}", "head.anchors=null", "head.steps=7"]
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return estimate(recipe).memory["activations"]

    assert activations(1 << 20) == pytest.approx(16 * activations(1 << 16), rel=0.25)


def test_muon_keeps_one_moment_of_the_matrices_inside_the_head(material, tmp_path):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "training.muon=true"))
    head = build_model(recipe, []).head
    inside = sum(p.numel() for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name)
    trained = sum(p.numel() for p in head.parameters())
    assert estimate(recipe).memory["optimizer"] * GIB == pytest.approx(8 * trained - 4 * inside)


def test_processes_are_those_of_the_recipe_unless_others_are_given_and_ddp_unless_told(material, tmp_path):
    def found(*more, **given):
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return estimate(recipe, **given)

    assert (found().processes, found().distributed) == (1, "no")
    assert (found(processes=4).distributed, "buckets" in found(processes=4).memory) == ("ddp", True)
    asked = found("launch.processes=4", "launch.distributed=fsdp2")
    assert (asked.processes, asked.distributed) == (4, "fsdp2")
    assert (found("launch.processes=4").distributed, found("launch.processes=4", processes=2).processes) == ("ddp", 2)


def test_what_autocast_copies_and_what_a_process_takes_without_a_model(material, tmp_path):
    def memory(*more):
        recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, *more))
        return {name: size * GIB for name, size in estimate(recipe).memory.items()}

    trained, embedding = memory()["head"] / 4, 97 * 32
    assert "autocast" not in memory()
    assert memory("training.bf16=true")["autocast"] == pytest.approx(2 * (trained + embedding))
    assert memory("training.bf16=true", "base_dtype=bfloat16")["autocast"] == pytest.approx(2 * trained)
    runtime = 0.5 * GIB if torch.cuda.is_available() else psutil.Process().memory_info().rss
    assert memory()["runtime"] == pytest.approx(runtime, rel=0.05)


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
        return estimate(recipe).memory["base"] * GIB

    layers = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)  # q and o, k and v, the three of the MLP
    assert base() - base("quantize=4bit") == pytest.approx(layers * (4 - 0.5 - 1 / 64))
    assert base() - base("quantize=8bit") == pytest.approx(layers * (4 - 1))


def test_the_rows_steps_and_time_of_a_run_with_what_follows_it(material, tmp_path, monkeypatch):
    recipe = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "head.anchors=null"))
    found, model = estimate(recipe), build_model(recipe, [])
    head = sum(p.numel() for p in model.head.parameters())
    # Two steps, of which each applies the block, the fusing layer and the output matrix.
    operations = 2 * (found.base_parameters - 97 * 32) + 6 * 2 * head  # nothing is multiplied with embeddings
    assert found.tokens_per_second == pytest.approx(1e9 / operations)
    train, held_out, _ = load_rows(recipe)
    assert (found.budget.rows, found.budget.held_out) == (len(train), len(held_out))
    assert (found.budget.steps, found.budget.batch, found.budget.evaluations) == (4, 4, 1)
    tokens = 4 * 4 / len(train) * sum(map(len, train["input_ids"]))
    assert 1 <= found.seconds["training"] * found.tokens_per_second / tokens < 1.5, "padding is counted too"
    assert found.seconds["evaluation"] > 0 and 0 < found.seconds["parity gate"] <= 30
    assert "held out, of which" in "\n".join(found.lines()) and "minutes (training 0:0" in "\n".join(found.lines())
    monkeypatch.setattr(code.psutil, "cpu_percent", lambda interval: 100.0)
    assert "this machine is busy" in estimate(recipe).lines()[-1]
    unread = read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2, "data.train=none.jsonl"))
    assert "rows: not counted (no file 'none.jsonl'" in "\n".join(estimate(unread).lines())
    with pytest.raises(ValueError, match="processes=0"):
        estimate(recipe, 0)


def test_a_budget_counts_steps_as_the_trainer_does_and_bounds_evaluations():
    def of(share=0.1, rows=100, held_out=50, processes=1, **training):
        return Budget.of({"per_device_train_batch_size": 4, **training}, rows, held_out, share, processes)

    assert of(num_train_epochs=2).steps == 50 and of(num_train_epochs=2, processes=2).steps == 26
    assert of(gradient_accumulation_steps=3).steps == 27 and of(max_steps=7).steps == 7
    assert of(eval_strategy="no").evaluations == 1 and of(held_out=0).evaluations == 0
    assert of(max_steps=10, eval_strategy="steps", eval_steps=3).evaluations == 4, "one after the last step, too"
    assert of(max_steps=10, eval_strategy="steps", eval_steps=0.5).evaluations == 2
    assert of(num_train_epochs=3, eval_strategy="epoch").evaluations == 3
    assert (
        of(max_steps=100).evaluated == 40 and of(max_steps=1).evaluated == 8 and of(None, max_steps=1).evaluated == 50
    )
    few = of(max_steps=50)
    assert few.select(datasets.Dataset.from_dict({"n": range(50)}))["n"] == [int(2.5 * i) for i in range(20)]


def test_a_dry_run_prints_and_starts_nothing(material, tmp_path, capsys):
    options = overrides(material, tmp_path / "out", 2)
    recipe = str(ROOT / "recipes" / "eagle3.yaml")
    assert heads.main([recipe, *options, "--dry-run", "launch.processes=8", "launch.distributed=fsdp2"]) == 0
    said = capsys.readouterr().out
    assert "while the first process loads the base for all" in said and "each of 8 processes (fsdp2)" in said
    assert heads.main([recipe, *options, "--dry-run", "launch.processes=8", "launch.distributed=zero2"]) == 0
    assert "whole in each process" in capsys.readouterr().out
    code, out, _ = run(capsys, "train", recipe, *options, "--dry-run", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["processes"] == 1 and record["memory_total"] == pytest.approx(sum(record["memory"].values()))
    assert record["budget"]["steps"] == 4 and not (tmp_path / "out").exists()
