"""A target that ships MTP modules, as `init_from`: beside it, from saved features, and in what is said before a run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from specheads.cli.commands.info import checkpoint_record
from specheads.decoding.verify.causal import Target
from specheads.training.estimate import estimate
from specheads.training.features.extract import save_features
from specheads.training.features.plan import SaveOptions
from specheads.training.recipe.recipe import Recipe
from specheads.training.run import prepare
from tests.support.command_line import ship
from tests.support.shipped_mtp import write

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module", params=["mimo", "qwen3_next", "deepseek_v3, three modules"])
def target(request, tmp_path_factory):
    """A folder with a target, its modules, a byte tokenizer and rows; and the modules' tensors."""
    folder, tokens = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("tokens")
    modules = write(folder, request.param)
    ship(tokens)
    for file in (tokens / "base").glob("tokenizer*"):
        shutil.copy(file, folder)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (9, 14, 7, 12, 20, 11)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return folder, modules


def recipe(folder, output, features=None):
    training = {
        "output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "optim": "sgd",
        "learning_rate": 0.1,
    }  # fmt: skip
    data = {"train": str(folder / "rows.jsonl"), "max_length": 24}
    source = (
        {"base": str(folder), "base_dtype": "float32", "data": data} if features is None else {"features": features}
    )
    return Recipe.from_dict({**source, "init_from": str(folder), "training": training, "parity": {"prompts": 0}})


@pytest.mark.sampled(3)
def test_a_shipped_module_learns_from_saved_features_as_beside_its_target(target, tmp_path):
    folder, _ = target
    plain = recipe(folder, tmp_path / "live")
    save_features(plain, SaveOptions(tmp_path / "saved", batch_size=2), None)
    losses, heads = [], []
    for features in (None, str(tmp_path / "saved")):
        run = prepare(recipe(folder, tmp_path / ("live" if features is None else "disk"), features))
        run.train()
        losses.append([entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry])
        heads.append(load_file(run.trainer.args.output_dir + "/model.safetensors"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][0] > 0
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.sampled(3)
def test_the_estimate_and_info_know_the_module(target, tmp_path):
    folder, modules = target
    record = checkpoint_record(folder)
    floats = [t for t in modules.values() if t.is_floating_point()]
    assert record["kind"] == "mtp" and record["parameters"] == sum(t.numel() for t in floats)
    assert record["megabytes"] == round(sum(t.numel() * t.element_size() for t in floats) / 1e6, 2)
    trained = estimate(recipe(folder, tmp_path)).trained_parameters
    run = prepare(recipe(folder, tmp_path))
    assert record["tapped_layers"] == list(run.trainer.model.head.layers)
    assert ("recurrent_states" in record) == bool(Target(run.trainer.model.base).recurrent)
    assert trained == sum(p.numel() for p in run.trainer.model.parameters() if p.requires_grad) > 0
