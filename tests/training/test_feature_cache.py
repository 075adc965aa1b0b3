"""feature_cache: a run that keeps what its base sees learns as one that does not, and runs the base in one epoch."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.distributed import launch
from specheads.training.errors import TrainingError
from specheads.training.features import cache as cache_file
from specheads.training.features.cache import RECORD, STATES, FeatureCache, Origin
from specheads.training.features.shards import FeatureError
from specheads.training.recipe.recipe import RecipeError
from specheads.training.run import prepare
from tests.support.saved_features import HEADS, material, recipe
from tests.support.training_runs import forked

pytestmark = pytest.mark.usefixtures("cache_in_tmp")
EPOCHS = {"max_steps": 21, "optim": "sgd", "learning_rate": 0.1, "eval_strategy": "no"}  # three of seven steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"))


def run_of(folder, output, kind="eagle3", cache=None, data=None, **training):
    options = {**EPOCHS, **training}
    return prepare(replace(recipe(folder, output, kind, data=data, **options), feature_cache=cache and str(cache)))


def losses(run):
    return [entry["loss"] for entry in run.trainer.state.log_history if "loss" in entry]


def passes_of(run):
    """After how many steps the base runs, from now on; after 21, the last, it does so to evaluate."""
    passes = []
    run.trainer.model.base.model.register_forward_hook(lambda *args: passes.append(run.trainer.state.global_step))
    return passes


@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in HEADS), ("eagle3", True)])
@pytest.mark.sampled(6)
def test_losses_and_checkpoint_are_those_without_and_the_base_runs_in_the_first_epoch_alone(
    kind, packing, folder, tmp_path
):
    data = {"packing": packing, "max_length": 48 if packing else 24}
    live, cached = (
        run_of(folder, tmp_path / n, kind, cache, data) for n, cache in (("a", None), ("b", tmp_path / "c"))
    )
    passes = passes_of(cached)
    live.train(), cached.train()
    epoch = -(-len(cached.trainer.train_dataset) // 2)
    assert passes == [*range(epoch), 21]
    assert losses(cached) == pytest.approx(losses(live), rel=2e-6)
    files = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
    again = run_of(folder, tmp_path / "d", kind, tmp_path / "c", data)  # another run over the same rows
    passes = passes_of(again)
    again.train()
    assert losses(again) == pytest.approx(losses(live), rel=2e-6)
    assert passes == [21]


def test_a_run_that_stopped_in_the_first_epoch_resumes_as_if_it_had_not(folder, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    whole = run_of(folder, tmp_path / "whole", cache=tmp_path / "one", **saving)
    whole.train()
    run_of(folder, tmp_path / "cut", cache=tmp_path / "two", **{**saving, "max_steps": 5}).train()  # two steps past it
    resumed = run_of(
        folder,
        tmp_path / "cut",
        cache=tmp_path / "two",
        resume_from_checkpoint=str(tmp_path / "cut/checkpoint-3"),
        **saving,
    )
    passes = passes_of(resumed)
    resumed.train()
    assert passes == [5, 6, 21]
    assert losses(resumed)[-16:] == losses(whole)[-16:]


@pytest.mark.slow
def test_two_processes_share_a_cache(folder, tmp_path):
    """Rows are dealt anew each epoch, so each process reads what the other one wrote."""

    def train(output, cache):
        run = run_of(folder, output, cache=cache, per_device_train_batch_size=1)
        passes = passes_of(run)
        run.train()
        rank = run.trainer.args.process_index
        (tmp_path / f"{output.name}-{rank}.json").write_text(json.dumps([losses(run), passes]))

    for output, cache in ((tmp_path / "live", None), (tmp_path / "cached", tmp_path / "c")):
        forked(2, train, output, cache)
    for rank in (0, 1):
        live, cached = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("live", "cached"))
        assert cached[0] == pytest.approx(live[0], rel=2e-6)
        assert [step for step in cached[1] if step < 21] == list(range(7))


def test_a_row_that_changed_on_disk_is_computed_again(folder, tmp_path, caplog):
    live, cached = (run_of(folder, tmp_path / n, cache=c) for n, c in (("a", None), ("b", tmp_path / "c")))
    live.train(), cached.train()
    with open(tmp_path / "c" / STATES, "r+b") as states:
        states.seek(1000)
        byte = states.read(1)
        states.seek(1000)
        states.write(bytes([byte[0] ^ 1]))
    again = run_of(folder, tmp_path / "d", cache=tmp_path / "c")
    passes = passes_of(again)
    again.train()
    assert len(passes) == 2 and "is damaged: the base is run on it again" in caplog.text
    assert losses(again) == pytest.approx(losses(live), rel=2e-6)


def test_what_does_not_fit_is_refused(folder, tmp_path, monkeypatch):
    run_of(folder, tmp_path / "a", cache=tmp_path / "c", max_steps=1).train()
    for options, what in (
        ({"kind": "medusa"}, "taps"),
        ({"data": {"max_length": 12}}, "text"),
        ({"bf16": True}, "autocast"),
    ):
        with pytest.raises(FeatureError, match=rf"holds what another run's base saw \({what} differ\)"):
            run_of(folder, tmp_path / "a", cache=tmp_path / "c", **options)
    half = replace(recipe(folder, tmp_path / "a", "eagle3", **EPOCHS), base_dtype="bfloat16")
    with pytest.raises(FeatureError, match=r"what another run's base saw \(dtype differ\)"):
        prepare(replace(half, feature_cache=str(tmp_path / "c")))
    states = (tmp_path / "c" / STATES).read_bytes()
    (tmp_path / "c" / STATES).write_bytes(states[:-1])
    with pytest.raises(FeatureError, match=rf"its files have .*{len(states) - 1}.* bytes, not .*{len(states)}"):
        run_of(folder, tmp_path / "a", cache=tmp_path / "c")
    (tmp_path / "c" / RECORD).write_text("{")
    with pytest.raises(FeatureError, match=r"is no whole cache of features \(.*\): delete it"):
        run_of(folder, tmp_path / "a", cache=tmp_path / "c")
    with pytest.raises(FeatureError, match="holds something other than a cache of features"):
        run_of(folder, tmp_path / "a", cache=folder)
    with pytest.raises(RecipeError, match="with features none is in memory"):
        replace(recipe(folder, tmp_path, features="x"), feature_cache="y")
    with monkeypatch.context() as patch:
        patch.setattr(launch, "kind_of", lambda accelerator: "zero3")
        with pytest.raises(launch.LaunchError, match="and zero3 runs it in all processes at once"):
            run_of(folder, tmp_path / "a", cache=tmp_path / "d")
    with pytest.raises(RecipeError, match="feature_cache=3: expected a folder"):
        replace(recipe(folder, tmp_path), feature_cache=3)


def test_a_disk_without_room_ends_the_run_in_one_line_and_leaves_no_part(folder, tmp_path, monkeypatch):
    def full(path, size):
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file, "_fill", full)
    run = run_of(folder, tmp_path / "a", cache=tmp_path / "c")
    with pytest.raises(TrainingError, match=r"has no room for .* GB of features \(No space left"):
        run.train()
    assert list((tmp_path / "c").iterdir()) == []


def test_a_row_counts_as_saved_only_once_it_is_whole(tmp_path):
    origin, ones = Origin("base", "torch.float32", None, (1,), "no", "text"), torch.ones(2, 3, 4)
    cache = FeatureCache(tmp_path / "c", origin, [3, 2, 3])
    assert not cache.holds([0])
    cache.write([0, 1], ones, 2 * ones[..., :2])
    assert cache.holds([0, 1]) and not cache.holds([1, 2])
    features, hidden = FeatureCache(tmp_path / "c", origin, [3, 2, 3]).read([1, 0], 3, torch.device("cpu"))
    assert features[0].tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] and hidden[1].tolist() == [[2.0] * 2] * 3
    (tmp_path / "c" / RECORD).unlink()  # as a process leaves it that ends while the folder is made
    again = FeatureCache(tmp_path / "c", origin, [3, 2, 3])
    again.write([2], ones[:1], ones[:1, :, :2])
    assert again.holds([2]) and not again.holds([0])
    assert json.loads((tmp_path / "c" / RECORD).read_text())["sizes"] == [4, 2]
