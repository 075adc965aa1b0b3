"""Under DeepSpeed every kind of head trains as on one process, whatever rows each process has, and a run resumes with
another number of them."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.distributed import checkpoints as zero
from specheads.training.distributed.resume import ResumeError, Unlogged, Writers
from tests.support.training_runs import assert_same_run, launched
from tests.workers.heads_by_two import HEADS, trained
from tests.workers.runs_of_two import SAVED
from tests.workers.runs_of_two import run as run_alone
from tests.workers.zero_runs import OPTIONS


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By head: the log of one process, and the file it saved."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: (trained(name, folder / name, 1).state.log_history, folder / name) for name in HEADS}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_every_kind_of_head_trains_under_zero_as_on_one_process(stage, alone, tmp_path):
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    launched(2, "heads_by_two.py", stage, tmp_path)
    for name, (log, folder) in alone.items():
        for expected, got in zip(log, json.loads((tmp_path / f"{name}.json").read_text()), strict=True):
            for key in expected.keys() & {"loss", "grad_norm", "accepted_length", "eval_loss", "eval_accepted_length"}:
                assert got[key] == pytest.approx(expected[key], rel=1e-4), f"{name}: {key} of step {expected['step']}"
        whole, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / name / "model.safetensors")
        assert whole.keys() == saved.keys()
        for part, tensor in whole.items():
            torch.testing.assert_close(saved[part], tensor, rtol=1e-3, atol=1e-4, msg=f"{name}: {part}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_run_resumes_with_another_number_of_processes(stage, tmp_path):
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    whole = run_alone(tmp_path / "whole", "eagle3", 1, **OPTIONS)
    for processes, others in ((2, 1), (1, 2)):
        launched(processes, "zero_runs.py", stage, tmp_path / f"{processes}")
        checkpoint = tmp_path / f"{processes}" / f"checkpoint-{SAVED}"
        before = {path.relative_to(checkpoint) for path in checkpoint.rglob("*")}
        launched(others, "zero_runs.py", stage, tmp_path / f"{processes}-{others}", checkpoint)
        assert {path.relative_to(checkpoint) for path in checkpoint.rglob("*")} == before
        for folder in (tmp_path / f"{processes}", tmp_path / f"{processes}-{others}"):
            assert_same_run(
                whole, json.loads((folder / "log.json").read_text()), load_file(folder / "model.safetensors")
            )
        saved = [torch.load(path, weights_only=False) for path in checkpoint.rglob("*model_states.pt")]
        assert saved and not [name for one in saved for name in one["module"] if name.startswith("base.")]


def test_a_checkpoint_that_deepspeed_cannot_convert_is_an_error(tmp_path):
    (tmp_path / "latest").write_text("global_step3")
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "left").touch()
    with (
        pytest.raises(ResumeError, match=r"could not convert it for this one: .*Error"),
        zero.universal_checkpoint(tmp_path),
    ):
        pass
    assert not (tmp_path / "universal" / "left").exists()


def test_step_counts_and_groups_are_restored_each_for_itself(tmp_path):
    """As DeepSpeed leaves them at stage 3."""
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [one], "weight_decay": 0.3}, {"params": [two], "weight_decay": 0.3}])
    shared = torch.tensor(3.0)
    for parameter in (one, two):
        optimizer.state[parameter] = {"step": shared, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
        parameter.grad = torch.ones(2)
    groups = [{**group, "params": [9]} for group in optimizer.param_groups]
    groups[1]["weight_decay"] = 0.0
    (tmp_path / "zero").mkdir()
    torch.save({"param_groups": groups}, tmp_path / "zero" / "optimizer_state.pt")
    zero.repair_optimizer(optimizer, tmp_path)
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [4, 4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[1]["params"][0] is two


def test_a_checkpoint_of_as_many_processes_is_read_as_it_is(tmp_path):
    read = []
    engine = SimpleNamespace(
        save_checkpoint=lambda *args, **options: options,
        load_checkpoint=lambda folder, **options: read.append(options),
    )
    zero.patch_engine(engine)
    assert engine.save_checkpoint("x") == {"exclude_frozen_parameters": True}
    Unlogged([], 0.0, 1).save(str(tmp_path), 0, Writers(1, 4, "zero2"))
    engine.load_checkpoint(str(tmp_path), load_module_strict=True, load_optimizer_states=True)
    assert read == [{"load_module_strict": False, "load_optimizer_states": True}]
