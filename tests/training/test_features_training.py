"""Training on saved features is training beside the base: the same losses, the same heads, and no base."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from specheads.decoding.verify.hf_base import logits_of, text_config
from specheads.heads import head_config
from specheads.losses.teacher import tap_base
from specheads.models.checkpoint import build_head
from specheads.models.spec_model import SpecModel
from specheads.training.distributed.resume import ResumeError
from specheads.training.features import frozen_weights
from specheads.training.features.dataset import FeatureDataset
from specheads.training.features.shards import FeatureError
from specheads.training.run import prepare
from tests.support.families import FAMILIES, build
from tests.support.saved_features import HEADS, TAPS, dump, material, recipe

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"))


def history(run):
    timed = ("runtime", "cpu_seconds", "per_second", "flos", "preparation_time")
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in timed)}
        for entry in run.trainer.state.log_history
    ]


def trained(*args, **options):
    run = prepare(recipe(*args, **options))
    run.train()
    return run


def assert_same(first, second, rel):
    one, two = history(first), history(second)
    assert len(one) == len(two) > 6
    for expected, got in zip(one, two, strict=True):
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=rel, abs=1e-7), name


@pytest.mark.parametrize(
    ("kind", "packing"), [*((kind, False) for kind in HEADS), ("medusa", True), ("eagle", True), ("eagle3", True)]
)
@pytest.mark.sampled(5)
def test_training_from_saved_features_equals_training_beside_the_base(kind, packing, tmp_path):
    folder = material(tmp_path)
    data = {"packing": packing, "max_length": 48}
    sgd = {
        "optim": "sgd",
        "learning_rate": 0.1,
    }  # Adam makes a whole step of what is a rounding error at a gradient of 0
    live = trained(folder, tmp_path / "live", kind, data=data, **sgd)
    dump(folder, tmp_path / "saved", data=data)
    saving = {"save_strategy": "steps", "save_steps": 2}
    shutil.move(folder / "base", folder / "away")  # nothing of it can be read
    saved = trained(folder, tmp_path / "disk", kind, features=tmp_path / "saved", **saving, **sgd)
    assert_same(live, saved, rel=2e-5)  # a norm of float32 gradients that are summed in another order
    for (name, ours), theirs in zip(
        live.trainer.model.head.state_dict().items(), saved.trainer.model.head.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6, msg=name)
    kept = {name for name, _ in saved.trainer.model.base.named_parameters()}
    assert kept == {"embed_tokens.weight", "lm_head.weight"}
    # And a run that resumes from the middle is the same run.
    torch.manual_seed(3)
    resume = {"resume_from_checkpoint": str(tmp_path / "disk" / "checkpoint-2"), **sgd}
    resumed = trained(folder, tmp_path / "disk", kind, features=tmp_path / "saved", **resume)
    losses = [[entry["loss"] for entry in history(run) if "loss" in entry] for run in (saved, resumed)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="is not in memory"):
        saved.trainer.model.generate(torch.tensor([[5]]))
    # The head decodes beside the base, which its config names.
    shutil.move(folder / "away", folder / "base")
    model = SpecModel.from_pretrained(tmp_path / "disk")
    reference = SpecModel.from_pretrained(tmp_path / "live")
    assert model.config.base_fingerprint == reference.config.base_fingerprint
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(prompt, max_new_tokens=8), reference.base.generate(prompt, max_new_tokens=8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "rel"), [({"dtype": "bfloat16"}, 2e-3), ({"dtype": "float8_e4m3fn"}, 2e-2)])
@pytest.mark.parametrize("kind", HEADS)
def test_narrower_features_give_nearly_the_same_loss(kind, options, rel, folder, tmp_path):
    dump(folder, tmp_path / "saved", **options)
    runs = [
        prepare(recipe(folder, tmp_path, kind, features=features)).trainer for features in (None, tmp_path / "saved")
    ]
    exact, near = (trainer.evaluate()["eval_loss"] for trainer in runs)
    assert near == pytest.approx(exact, rel=rel) and near != exact


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", HEADS)
def test_a_run_in_bf16_has_the_same_loss_from_features_saved_in_it_and_refuses_others(kind, folder, tmp_path):
    dump(folder, tmp_path / "saved", training={"bf16": True})
    runs = [prepare(recipe(folder, tmp_path, kind, features=features, bf16=True)).trainer
            for features in (None, tmp_path / "saved")]  # fmt: skip
    live, disk = (trainer.evaluate()["eval_loss"] for trainer in runs)
    exact = prepare(recipe(folder, tmp_path, kind)).trainer.evaluate()["eval_loss"]
    assert disk == pytest.approx(live, rel=2e-4) and live != exact  # to rounding in bfloat16
    with pytest.raises(FeatureError, match="was saved under autocast 'bf16', and this run computes under 'no'"):
        prepare(recipe(folder, tmp_path, kind, features=tmp_path / "saved"))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32"])
def test_a_recipe_in_bf16_saves_every_dtype(dtype, folder, tmp_path):
    dump(folder, tmp_path / "saved", dtype=dtype, training={"bf16": True})
    runs = [prepare(recipe(folder, tmp_path, "eagle3", features=features, bf16=True)).trainer
            for features in (None, tmp_path / "saved")]  # fmt: skip
    live, disk = (trainer.evaluate()["eval_loss"] for trainer in runs)
    assert disk == pytest.approx(live, rel=2e-2)


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_a_head_that_reads_the_last_layers_output_learns_the_same_from_saved_features(kind, folder, tmp_path):
    taps = {"taps": (1, 2, 5)}
    live = trained(folder, tmp_path / "live", kind, head=taps)
    dump(folder, tmp_path / "saved", **taps)
    saved = trained(folder, tmp_path / "disk", kind, head=taps, features=tmp_path / "saved")
    assert_same(live, saved, rel=1e-4)
    others = trained(folder, tmp_path / "others", kind, head={"taps": (1, 2, 4)})
    assert history(others)[0]["loss"] != pytest.approx(history(live)[0]["loss"], rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", HEADS)
def test_as_many_likeliest_tokens_as_there_are_give_the_whole_distribution(kind, folder, tmp_path):
    dump(folder, tmp_path / "saved", teacher_probs=9999)
    runs = [prepare(recipe(folder, tmp_path, kind, {"loss": "kl:0.5,lk:1"}, features=f)).trainer.evaluate()
            for f in (None, tmp_path / "saved")]  # fmt: skip
    for name in ("eval_loss", "eval_accepted_length", "eval_loss_depth_1", "eval_loss_depth_2"):
        if name in runs[0]:
            assert runs[1][name] == pytest.approx(runs[0][name], rel=2e-6), name


def test_without_probabilities_heads_learn_the_text_and_nothing_else(folder, tmp_path):
    dump(folder, tmp_path / "saved", teacher_probs="none")
    live, disk = (prepare(recipe(folder, tmp_path, features=f)).trainer for f in (None, tmp_path / "saved"))
    assert disk.evaluate()["eval_loss"] == pytest.approx(live.evaluate()["eval_loss"], rel=2e-6)
    with pytest.raises(FeatureError, match=r"loss 'ce' needs .* was saved with --teacher-probs none"):
        prepare(recipe(folder, tmp_path, "eagle3", features=tmp_path / "saved"))


def test_a_run_resumes_on_its_own_saved_rows_alone(folder, tmp_path):
    (tmp_path / "other.jsonl").write_text("".join(reversed((folder / "train.jsonl").read_text().splitlines(True))))
    dump(folder, tmp_path / "saved")
    dump(folder, tmp_path / "other", data={"train": str(tmp_path / "other.jsonl")})
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "resume_from_checkpoint": "auto"}
    trained(folder, tmp_path / "out", features=tmp_path / "saved", max_steps=2, **saving)
    with pytest.raises(ResumeError, match=r"other data \(14 rows, checksum (\w+) .*; here 14 rows, checksum (?!\1)"):
        trained(folder, tmp_path / "out", features=tmp_path / "other", **saving)
    trained(folder, tmp_path / "out", features=tmp_path / "saved", **saving)


def test_the_draft_vocabulary_is_counted_on_the_saved_rows(folder, tmp_path):
    dump(folder, tmp_path / "saved")
    heads = [prepare(recipe(folder, tmp_path, "eagle3", features=f)).trainer.model.head
             for f in (None, tmp_path / "saved")]  # fmt: skip
    assert torch.equal(heads[0].t2d, heads[1].t2d) and int(heads[0].t2d.sum()) == 40
    assert torch.equal(heads[0].lm_head.weight, heads[1].lm_head.weight)


def test_layers_that_were_not_saved_are_named(folder, tmp_path):
    dump(folder, tmp_path / "saved", taps=(2, 4))
    assert FeatureDataset(tmp_path / "saved", (4, 2))[0]["features"].shape[1] == 64
    with pytest.raises(FeatureError, match=r"reads layers \(1, 2, 4\), .* holds \(2, 4\): .* --taps 1,2,4"):
        prepare(recipe(folder, tmp_path, "eagle3", features=tmp_path / "saved"))


@pytest.mark.parametrize(
    "family", ["Llama", "Llama, tied, biased, one key head", "Gemma-3", "GPT-2", "Phi", "Qwen3-MoE", "OPT", "Cohere"]
)
def test_heads_start_from_what_is_kept_as_they_start_beside_the_base(family, tmp_path):
    base = build(*FAMILIES[family])
    if getattr(base.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(base.get_output_embeddings().bias)  # it is 0 in a new model
    frozen_weights.save_base_parts(base, tmp_path)
    saved = load_file(tmp_path / "base" / "kept.safetensors")
    assert frozen_weights.kept_bytes(base.config, base.dtype) == sum(t.nbytes for t in saved.values())
    kept, start = frozen_weights.KeptBase(tmp_path, "name"), frozen_weights.skeleton(tmp_path)
    ids, hidden = torch.arange(20), torch.randn(6, base.get_output_embeddings().weight.shape[1])
    assert torch.equal(kept.get_input_embeddings()(ids), base.get_input_embeddings()(ids))
    torch.testing.assert_close(logits_of(kept, hidden), logits_of(base, hidden))
    assert any(p.is_meta for p in start.parameters())  # the other layers
    for kind, options in HEADS.items():
        config = head_config(kind, dict(options))
        made = []
        for beside in (base, start):
            head_of = config.with_base_defaults(text_config(beside))
            torch.manual_seed(0)
            head = build_head(head_of, beside)
            head.copy_frozen_weights(beside)
            head.initialise(beside)
            made.append(head.state_dict())
        for name, tensor in made[0].items():
            assert torch.equal(tensor, made[1][name]), (kind, name)


@pytest.mark.parametrize("taps", [TAPS, (1, 4, 5)], ids=["hidden states", "the last layer's output too"])
def test_what_is_saved_is_what_the_base_gives(taps, folder, tmp_path):
    dump(folder, tmp_path / "saved", taps=taps)
    trainer = prepare(recipe(folder, tmp_path, "eagle3")).trainer
    rows = FeatureDataset(tmp_path / "saved", taps)
    assert len(rows) == len(trainer.train_dataset) == 14
    for i in (0, 3, 13, 5):
        ids = torch.tensor([trainer.train_dataset[i]["input_ids"]])
        features, teacher = tap_base(
            trainer.model.base, ids, torch.ones_like(ids), torch.arange(ids.shape[1]).unsqueeze(0), taps
        )
        assert rows[i]["labels"].tolist() == trainer.train_dataset[i]["labels"]
        torch.testing.assert_close(rows[i]["features"], features[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rows[i]["last_hidden"], teacher.outputs, rtol=1e-5, atol=1e-5)
