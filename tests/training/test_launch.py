"""Several processes train like one, and a launcher that started something else is stopped."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers.integrations import deepspeed

from specheads.models.spec_model import SpecModel
from specheads.training.build import training_arguments
from specheads.training.distributed import launch
from specheads.training.distributed.launch import LaunchConfig, LaunchError
from specheads.training.distributed.sharded_base import first_loads, unsharded
from specheads.training.recipe.arguments import SpecTrainingArguments
from specheads.training.recipe.recipe import RecipeError, read_recipe
from specheads.training.run import prepare
from tests.support.paths import ROOT
from tests.support.training_runs import RUNNING_UNDER, forked, overrides, run_module

ACCELERATE = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def history(output):
    return json.loads((output / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("start", ["forks", pytest.param("accelerate launch", marks=pytest.mark.slow)])
def test_two_gloo_processes_give_the_single_process_loss(start, material, tmp_path, monkeypatch):
    alone = prepare(read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path / "one", 2)))
    alone.train()
    asked = overrides(material, tmp_path / "two", 1, "launch.processes=2", "launch.distributed=ddp")
    if start == "forks":
        monkeypatch.syspath_prepend(str(ROOT / "train"))
        import heads

        forked(2, heads.main, [str(ROOT / "recipes" / "eagle3.yaml"), *asked])
    else:
        config = str(ROOT / "recipes" / "accelerate" / "cpu.yaml")
        command = ["accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
        done = run_module([*command, "train/heads.py", "recipes/eagle3.yaml", *asked])
        assert done.returncode == 0, done.stderr[-3000:]
    timed = ("runtime", "cpu_seconds", "length_error", "per_second", "flos", "preparation_time")
    one, two = history(tmp_path / "one"), history(tmp_path / "two")
    assert len(one) == len(two) and sum("loss" in entry for entry in one) == 4
    for expected, got in zip(one, two, strict=True):
        assert expected.keys() - {"eval_model_preparation_time"} == got.keys() - {"eval_model_preparation_time"}
        for name, value in expected.items():
            # Float32 sums in another order, through four optimizer steps.
            if not any(part in name for part in timed):
                assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    first, last = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in first.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_precision_of_the_launcher_that_the_recipe_does_not_name_is_refused(material, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    said = overrides(material, tmp_path, 2)
    with pytest.raises(
        RecipeError, match=r"asks for mixed precision 'bf16', and the recipe for 'no': give --mixed_prec"
    ):
        training_arguments(read_recipe(str(ROOT / "recipes" / "eagle3.yaml"), said))
    assert training_arguments(read_recipe(str(ROOT / "recipes" / "eagle3.yaml"), [*said, "training.bf16=true"])).bf16


@pytest.mark.slow
def test_the_entry_point_trains_resumes_and_saves_a_head(material, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "train"))
    import heads

    recipe = str(ROOT / "recipes" / "eagle3.yaml")
    options = overrides(material, tmp_path, 2, "training.save_steps=2", "training.lr_scheduler_type=constant")
    assert heads.main([recipe, *options, "training.max_steps=2"]) == 0
    assert heads.main([recipe, *options]) == 0  # the recipe says resume_from_checkpoint: auto
    assert "accepted length" in capsys.readouterr().out
    steps = [entry["step"] for entry in history(tmp_path) if "loss" in entry]
    assert steps == [1, 2, 3, 4]
    model = SpecModel.from_pretrained(tmp_path)
    assert model.head.config.draft_vocab_size == 60
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["eval_accepted_length"] >= 1
    # And on from there: the draft vocabulary stays that of the first run.
    more = overrides(material, tmp_path / "more", 2, "head=null", f"init_from={tmp_path}")
    more = [option for option in more if not option.startswith("head.")]
    assert heads.main([recipe, *more]) == 0
    assert torch.equal(SpecModel.from_pretrained(tmp_path / "more").head.d2t, model.head.d2t)


def test_the_draft_vocabulary_is_counted_on_the_training_data(material, tmp_path):
    prepared = prepare(read_recipe(ROOT / "recipes" / "eagle3.yaml", overrides(material, tmp_path, 2)))
    counts = torch.zeros(97)
    for row in prepared.trainer.train_dataset:
        for label in row["labels"]:
            if label != -100:
                counts[label] += 1
    head = prepared.trainer.model.head
    assert counts[head.t2d].min() >= counts[~head.t2d].max()
    assert torch.equal(head.lm_head.weight.detach(), prepared.trainer.model.base.lm_head.weight[head.t2d])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["training.max_step=1"], "did you mean 'training.max_steps'"),
        (["data.train=none.jsonl"], "no file 'none.jsonl'"),
        (["base=./none"], "./none"),
        (["launch.processes=2"], "2 processes"),
        (["launch.distributed=fsdp2"], "'fsdp2'"),
        (["training.label_smoothing_factor=0.1"], "label_smoothing_factor=0.1: it has no effect on a head"),
        (["training.neftune_noise_alpha=5"], "neftune_noise_alpha=5: it has no effect on a head"),
        (
            ["training.head_lr_groups=lm_head:0.25"],
            "head_lr_groups='lm_head:0.25': expected {regular expression: factor}",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, message, material, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "train"))
    import heads

    recipe = str(ROOT / "recipes" / "eagle3.yaml")
    assert heads.main([recipe, *overrides(material, tmp_path, 2), *change]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train/heads.py: ")]
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.slow
def test_a_launcher_that_starts_one_process_only_is_stopped(material, tmp_path):
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "train/heads.py", "recipes/eagle3.yaml"]
    done = run_module([*command, *overrides(material, tmp_path, 1)])
    assert done.returncode != 0
    assert "the launcher's command line asks for 2 processes, but this run has 1" in done.stderr
    assert not (tmp_path / "model.safetensors").exists()


def test_help_shows_examples(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "train"))
    import heads

    with pytest.raises(SystemExit) as stopped:
        heads.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "accelerate launch" in text and "training.resume_from_checkpoint=auto" in text


def test_requests_are_compared_with_what_runs(monkeypatch):
    monkeypatch.setattr(launch, "_parent_command", lambda: ["python", "/bin/accelerate", "launch", "--num-processes=4"])
    for name in RUNNING_UNDER:
        monkeypatch.delenv(name, raising=False)
    launch.check(LaunchConfig(4, "ddp"), 4, "ddp")
    launch.check(LaunchConfig(4, "ddp"), 4)
    with pytest.raises(LaunchError, match="command line asks for 4 processes, but this run has 1"):
        launch.check(LaunchConfig(), 1, "no")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="environment asks for 2 processes, but this run has 4"):
        launch.check(LaunchConfig(), 4, "ddp")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(LaunchError, match="'fsdp2', but this run has 'ddp': FSDP needs one GPU a process"):
        launch.check(LaunchConfig(), 4, "ddp")
    launch.check(LaunchConfig(), 4, "fsdp2")


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (["python", "/usr/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "s.py"], 2),
        (["python", "-m", "accelerate.commands.launch", "--num_processes", "3", "s.py"], 3),
        (["accelerate", "launch", "--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), "s.py"], 8),
        (["accelerate", "launch", "--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), "--num_processes=2"], 2),
        (["bash", "-c", "accelerate launch --num_processes 2 s.py"], None),
        (["/venv/bin/accelerate-launch", "--num-processes", "5", "s.py"], 5),
        (["accelerate", "config", "--num_processes", "5"], None),
        (["make", "test"], None),
    ],
)
def test_the_launchers_command_line_is_read(command, processes):
    assert launch.from_command(command).processes == processes


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (None, None)),
        ({"WORLD_SIZE": "2"}, (2, None)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, (None, "zero3")),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, (None, None)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, (None, "fsdp")),
    ],
)
def test_the_launchers_environment_is_read(environment, expected):
    found = launch.from_environment(environment)
    assert (found.processes, found.distributed) == expected


def test_kinds_are_named_after_what_runs():
    def accelerator(kind, **state):
        return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=SimpleNamespace(**state))

    assert launch.kind_of(accelerator("NO")) == "no"
    assert launch.kind_of(accelerator("MULTI_CPU")) == launch.kind_of(accelerator("MULTI_GPU")) == "ddp"
    assert launch.kind_of(accelerator("DEEPSPEED", deepspeed_plugin=SimpleNamespace(zero_stage=3))) == "zero3"
    assert launch.kind_of(accelerator("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=2))) == "fsdp2"


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_every_shipped_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    kind, offload = path.stem.removesuffix("_offload"), path.stem.endswith("_offload")
    kinds = {"cpu": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type == kinds.get(kind, "DEEPSPEED") and config.num_processes >= 2
    options = yaml.safe_load(path.read_text())
    if kind.startswith("zero"):
        zero = options["deepspeed_config"]
        assert zero["zero_stage"] == int(kind[-1]) and zero.get("zero3_save_16bit_model", False) is (kind == "zero3")
        assert zero["offload_optimizer_device"] == ("cpu" if offload else "none")
        assert zero["offload_param_device"] == ("cpu" if offload and kind == "zero3" else "none")
    if kind == "fsdp2":
        assert options["fsdp_config"]["fsdp_version"] == 2
        assert options["fsdp_config"]["fsdp_offload_params"] is offload


@pytest.mark.slow
@pytest.mark.parametrize("named", [path.stem for path in ACCELERATE if path.stem not in ("cpu", "ddp")])
def test_sharded_processes_train_resume_and_save_the_head_of_one_process(named, material, tmp_path):
    kind = named.removesuffix("_offload")
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    steps = ["training.save_steps=2", "training.lr_scheduler_type=constant"]
    recipe = ROOT / "recipes" / "eagle3.yaml"
    prepare(read_recipe(recipe, overrides(material, tmp_path / "one", 2, *steps))).train()
    text = (ROOT / "recipes" / "accelerate" / f"{named}.yaml").read_text()
    config = tmp_path / "accelerate.yaml"
    config.write_text(text.replace("gpu_ids: all", "use_cpu: true"))
    command = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    script = "tests/workers/fsdp2_on_cpu.py" if kind == "fsdp2" else "train/heads.py"
    options = overrides(material, tmp_path / "two", 1, "launch.processes=2", f"launch.distributed={kind}", *steps)
    if named == "zero2":
        done = run_module([*command, "--main_process_port", "0", script, str(recipe), *options, "training.muon=true"])
        assert "train/heads.py: muon=true steps on whole matrices, which DeepSpeed flattens" in done.stderr
    for more in (["training.max_steps=2"], []):  # the second resumes: resume_from_checkpoint is auto in the recipe
        done = run_module([*command, "--main_process_port", "0", script, str(recipe), *options, *more])
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = history(tmp_path / "one"), history(tmp_path / "two")
    assert [entry["step"] for entry in two if "loss" in entry] == [1, 2, 3, 4]
    for name in ("loss", "accepted_length", "eval_loss", "eval_accepted_length"):
        expected, got = ({entry["step"]: entry[name] for entry in log if name in entry} for log in (one, two))
        assert {step: got[step] for step in expected} == pytest.approx(expected, rel=1e-3), name
    whole, saved = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert whole.keys() == saved.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-4)
    SpecModel.from_pretrained(tmp_path / "two")
    if kind == "fsdp2":
        kept = torch.load(tmp_path / "two" / "checkpoint-4" / "pytorch_model_fsdp.bin")
        assert kept.keys() == whole.keys()  # not the base


def test_models_are_loaded_whole_where_zero3_is_configured():
    class ZeRO3:  # what transformers asks of a DeepSpeed configuration
        def is_zero3(self):
            return True

    plugin = SimpleNamespace(hf_ds_config=ZeRO3())
    deepspeed.set_hf_deepspeed_config(plugin.hf_ds_config)
    try:
        with unsharded(SimpleNamespace(deepspeed_plugin=plugin)):
            assert not deepspeed.is_deepspeed_zero3_enabled()
            assert first_loads(SimpleNamespace(deepspeed_plugin=plugin))  # and the others get their shards later
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()


@pytest.mark.parametrize(("name", "kind"), [("cp", "context"), ("sp", "sequence")])
def test_a_launcher_that_divides_rows_between_processes_is_refused_with_the_reason(name, kind, tmp_path, monkeypatch):
    asked = f"{name}_size=2: {kind} parallelism gives each process a part of a row"
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    with pytest.raises(ValueError, match=asked):
        SpecTrainingArguments(**plain, parallelism_config=SimpleNamespace(**{f"{name}_size": 2}))
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "2")
    with pytest.raises(ValueError, match=asked):
        SpecTrainingArguments(**plain)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
    SpecTrainingArguments(**plain)
