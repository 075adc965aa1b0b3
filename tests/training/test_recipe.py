"""Recipes and overrides: what ships is valid, and what is wrong is said in one line before anything loads."""

import dataclasses

import pytest
import yaml
from transformers.integrations import integration_utils
from transformers.trainer_utils import IntervalStrategy

from specheads.heads import HEADS, Eagle3Config, MedusaConfig, MedusaHead
from specheads.training.build import resume_point, training_arguments
from specheads.training.recipe.recipe import Recipe, RecipeError, read_recipe, with_overrides
from specheads.training.trainer.trainer import SpecTrainingArguments
from tests.support.paths import ROOT
from tests.support.trainers import OPTIONS, model_of, rows, trainer_of

RECIPES = ROOT / "recipes"
SHIPPED = sorted(path for path in RECIPES.glob("*.yaml") if not path.stem.startswith("bench_"))
LEAST = {"base": "b", "head": {"kind": "medusa"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_short(path, tmp_path):
    recipe = read_recipe(path, [f"training.output_dir={tmp_path}", "training.bf16=false"])
    kind = {"coder-0.5b": "eagle3"}.get(path.stem, path.stem.removesuffix("2"))
    assert recipe.head is not None and recipe.head.kind == kind
    rates = {
        "medusa": 1e-3,
        "medusa2": 5e-4,
        "hydra": 5e-4,
        "eagle": 3e-5,
        "eagle3": 1e-4,
        "mtp": 1e-4,
        "parallel": 6e-4,
        "coder-0.5b": 3e-3,
    }
    assert training_arguments(recipe).learning_rate == rates[path.stem]
    assert len(path.read_text().splitlines()) <= 33


def test_the_published_hyperparameters_are_in_the_recipes():
    medusa, eagle, eagle3 = (yaml.safe_load((RECIPES / f"{n}.yaml").read_text()) for n in ("medusa", "eagle", "eagle3"))
    assert medusa["training"]["lr_scheduler_type"] == "cosine" and medusa["training"]["warmup_steps"] == 0.1
    assert eagle["training"]["warmup_steps"] == 2000 and eagle["training"]["max_grad_norm"] == 0.5
    assert eagle3["head"]["steps"] == 7 and eagle3["head"]["norm_before_residual"] is True  # not as published


def test_overrides_have_dots_and_yaml_types():
    recipe = read_recipe(
        RECIPES / "eagle3.yaml",
        ["head.steps=3", "training.learning_rate=1e-5", "training.bf16=false", "data.train=[a.jsonl, b.jsonl]",
         "launch.processes=2", "launch.distributed=no", "training.max_steps=10", "head.taps=[1, 2, 3]"],
    )  # fmt: skip
    assert isinstance(recipe.head, Eagle3Config) and recipe.head.steps == 3 and recipe.head.taps == (1, 2, 3)
    assert recipe.training["learning_rate"] == 1e-5 and recipe.training["bf16"] is False
    assert recipe.training["max_steps"] == 10 and recipe.data.train == ["a.jsonl", "b.jsonl"]
    assert (recipe.launch.processes, recipe.launch.distributed) == (2, "no")


def test_overrides_leave_the_mapping_they_were_given():
    options = {"head": {"kind": "eagle"}}
    assert with_overrides(options, ["head.noise=0.2", "launch.processes=1"])["head"] == {"kind": "eagle", "noise": 0.2}
    assert options == {"head": {"kind": "eagle"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["traning.max_steps=1"], "unknown option 'traning'; did you mean 'training'"),
        (["training.learning_rat=1"], "unknown option 'training.learning_rat'; did you mean 'training.learning_rate'"),
        (["learning_rate=1"], "unknown option 'learning_rate'; did you mean 'training.learning_rate'?"),
        (["kind=eagle"], "did you mean 'head.kind'?"),
        (["model=b"], "did you mean 'base'?"),
        (["head.learning_rate=1"], "unknown option 'head.learning_rate'; did you mean 'training.learning_rate'?"),
        (["training.max_length=9"], "did you mean 'data.max_length'?"),
        (["head=eagle3"], "head='eagle3': expected a mapping of options; did you mean head.kind=eagle3?"),
        (["data=a.jsonl"], "did you mean data.train=a.jsonl?"),
        (["head.kind="], "head.kind is missing"),
        (["head.num_head=1"], "unknown medusa head option 'num_head'; did you mean 'num_heads'"),
        (["data.max_lenght=1"], "unknown option 'data.max_lenght'; did you mean 'data.max_length'"),
        (["launch.process=1"], "unknown option 'launch.process'; did you mean 'launch.processes'"),
        (["launch.distributed=dpd"], "launch.distributed='dpd': expected one of no, ddp"),
        (["launch.processes=0"], "launch.processes=0: expected a whole number"),
        (["head.kind=medusaa"], "unknown head 'medusaa'; did you mean 'medusa'?"),
        (["head={}"], "head.kind is missing: give one of medusa, hydra, eagle"),
        (["head=null"], "neither"),
        (["init_from=x"], "not both; with init_from write head=null"),
        (["base=null"], "base is missing"),
        (["base=3"], "base=3: expected text"),
        (["base_dtype=fp8"], "unknown base_dtype 'fp8'; known: auto, float32"),
        (["training.output_dir=null"], "training.output_dir is missing"),
        (["data.max_length=1"], "max_length=1: expected a whole number of at least 2"),
        (["data=3"], "data=3: expected a mapping"),
        (["training.max_steps"], "expected key=value"),
        (["base.x=1"], "'base' is 'b', which has no options"),
        (["head.kind=[1"], "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(change, message):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(with_overrides(LEAST, change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_plain_no_is_a_strategy_and_not_false():
    options = with_overrides(LEAST, ["training.eval_strategy=no", "training.save_strategy=no", "training.bf16=no"])
    training = Recipe.from_dict(options).training
    assert (training["eval_strategy"], training["save_strategy"], training["bf16"]) == ("no", "no", False)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match="no recipe 'none"):
        read_recipe("none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(RecipeError, match="expected a mapping"):
        read_recipe(tmp_path / "list.yaml")


def test_auto_resumes_from_the_last_finished_checkpoint(tmp_path):
    def point(**training):
        return resume_point(Recipe.from_dict({**LEAST, "training": {"output_dir": str(tmp_path), **training}}))

    assert point() is None and point(resume_from_checkpoint="auto") is None
    for step, finished in ((9, True), (10, True), (11, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if finished:
            (folder / "trainer_state.json").write_text("{}")
    assert point(resume_from_checkpoint="auto") == str(tmp_path / "checkpoint-10")
    assert point() is None
    with pytest.raises(RecipeError, match="is no checkpoint folder"):
        point(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))


def test_training_options_that_trainer_refuses_are_recipe_errors(tmp_path):
    options = {**LEAST, "training": {"output_dir": str(tmp_path), "load_best_model_at_end": True}}
    with pytest.raises(RecipeError, match=r"^training: .*requires the save and eval strategy to match"):
        training_arguments(Recipe.from_dict(options))


def test_the_recipe_a_run_leaves_is_that_run_again(tmp_path):
    options = {
        **LEAST, "head": {"kind": "medusa", "num_heads": 3, "loss": "lk"}, "lora": {"r": 4, "base_loss": "ce"},
        "launch": {"processes": 2}, "parity": {"prompts": 3}, "base_dtype": "float32", "early_stopping": 2,
        "data": {"train": "d", "max_length": 99}, "quantize": "4bit",
        "training": {
            "output_dir": "o", "learning_rate": 0.5, "eval_strategy": "steps", "load_best_model_at_end": True,
            "metric_for_best_model": "accepted_length",
        },
    }  # fmt: skip
    recipe = Recipe.from_dict(options)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    again = read_recipe(tmp_path / "again.yaml")
    assert again == recipe
    named = {field.name for field in dataclasses.fields(Recipe)}
    left = {
        "head_dtype",
        "attn_implementation",
        "init_from",
        "features",
        "evaluation_share",
    }
    assert named - set(options) == left, "leave none out"
    unbound = Recipe.from_dict({**LEAST, "evaluation_share": None})
    (tmp_path / "again.yaml").write_text(unbound.to_yaml())
    assert read_recipe(tmp_path / "again.yaml") == unbound


def test_the_recipe_a_run_leaves_and_its_card_shows_has_no_token_of_the_hub():
    options = with_overrides(LEAST, ["training.hub_token=hf_secret", "training.push_to_hub=true"])
    recipe = Recipe.from_dict(options)
    assert recipe.training["hub_token"] == "hf_secret"
    assert "push_to_hub: true" in recipe.to_yaml() and "hf_secret" not in recipe.to_yaml()


def test_stopping_early_needs_something_to_stop_on():
    with pytest.raises(RecipeError, match=r"early_stopping=2 needs training\.eval_strategy"):
        Recipe.from_dict({**LEAST, "early_stopping": 2})


# --- The training section, against the fields of TrainingArguments ---


def with_training(**options):
    return Recipe.from_dict(LEAST | {"training": {"output_dir": "o", **options}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate=fast", "training.learning_rate='fast': expected a number"),
        ("learning_rate=true", "training.learning_rate=True: expected a number"),
        ("max_steps=1.5", "training.max_steps=1.5: expected a whole number"),
        ("max_steps=[1]", "training.max_steps=\\[1\\]: expected a whole number"),
        ("max_steps=true", "training.max_steps=True: expected a whole number"),
        ("max_steps=null", "training.max_steps=None: expected a whole number"),
        ("bf16=maybe", "training.bf16='maybe': expected true or false"),
        ("bf16=1", "training.bf16=1: expected true or false"),
        ("eval_steps=often", "training.eval_steps='often': expected a number or null"),
        ("output_dir=3", "training.output_dir=3: expected text or null"),
        ("eval_strategy=step", "unknown training.eval_strategy 'step'; did you mean 'steps'"),
        ("eval_strategy=yes", "training.eval_strategy=True: expected one of no, steps, epoch"),
        ("lr_scheduler_type=cosin", "unknown training.lr_scheduler_type 'cosin'; did you mean 'cosine'"),
        ("optim=adamw_torchh", "unknown training.optim 'adamw_torchh'; did you mean 'adamw_torch'"),
        ("lr_scheduler_kwargs=3", "training.lr_scheduler_kwargs=3: expected a mapping or text or null"),
        ("per_device_train_batch_size=-4", "training.per_device_train_batch_size=-4: expected at least 1"),
        ("per_device_eval_batch_size=0", "training.per_device_eval_batch_size=0: expected at least 1"),
        ("learning_rate=-1", "training.learning_rate=-1: expected at least 0"),
        ("gradient_accumulation_steps=0", "training.gradient_accumulation_steps=0: expected at least 1"),
        ("num_train_epochs=0", "training.num_train_epochs=0: expected more than 0, or training.max_steps"),
        (
            "metric_for_best_model=acepted_length",
            "unknown training.metric_for_best_model 'acepted_length'; did you mean 'accepted_length'",
        ),
        ("metric_for_best_model=eval_accuracy_depht_2", "unknown .*did you mean 'accuracy_depth_2'"),
        ("metric_for_best_model=accuracy_depth_0", "unknown training.metric_for_best_model 'accuracy_depth_0'"),
        ("report_to=3", "training.report_to=3: expected null or text or a list"),
        ("report_to=[wandb, 3]", r"training.report_to=.*: expected a list of names, and 3 is none"),
    ],
)
def test_a_training_option_of_another_type_is_refused_by_name(override, message):
    with pytest.raises(RecipeError, match=f"^{message}"):
        Recipe.from_dict(with_overrides(LEAST, [f"training.{override}"]))


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_figure_of_an_evaluation_may_choose_the_best_checkpoint(kind, tmp_path):
    others = ("runtime", "_second", "preparation_time", "eval_rows")  # no measures of a head
    measured = trainer_of(tmp_path, model_of(kind), rows(5, 1)).evaluate()
    found = [name for name in measured if name.startswith("eval_") and not name.endswith(others)]
    assert len(found) > 8
    for name in found:
        assert with_training(metric_for_best_model=name.removeprefix("eval_"))
        assert with_training(metric_for_best_model=name)


def test_a_loss_term_of_a_head_from_outside_may_choose_the_best_checkpoint(monkeypatch):
    class Config(MedusaConfig):
        kind = "outside"
        loss_terms = ("sharpness",)

    with pytest.raises(RecipeError, match=r"unknown training\.metric_for_best_model 'sharpness'"):
        with_training(metric_for_best_model="sharpness")
    monkeypatch.setitem(HEADS, "outside", type("Head", (MedusaHead,), {"Config": Config}))
    assert with_training(metric_for_best_model="sharpness")
    assert with_training(metric_for_best_model="eval_sharpness")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, r"^training: fp16=true: a CPU would train in float32: give bf16=true"),
        ({"accelerator_config": {"split_batches": True}}, "^training: accelerator_config: split_batches=true would"),
        ({"accelerator_config": '{"split_batches": true}'}, "^training: accelerator_config: split_batches=true would"),
    ],
)
def test_what_transformers_takes_and_a_head_would_not_learn_by_is_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        training_arguments(with_training(use_cpu=True, **options))


def test_bounds_hold_in_python_too():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0: expected at least 1"):
        SpecTrainingArguments("o", use_cpu=True, gradient_accumulation_steps=0)
    assert SpecTrainingArguments("o", use_cpu=True, num_train_epochs=0, max_steps=1).max_steps == 1


def test_yamls_plain_no_is_the_word_where_an_option_takes_that_word():
    texts = [f"training.{name}=no" for name in ("eval_strategy", "save_strategy", "logging_strategy", "report_to")]
    recipe = Recipe.from_dict(with_overrides(LEAST, [*texts, "training.bf16=no", "training.gradient_checkpointing=no"]))
    made = training_arguments(recipe)
    assert {made.eval_strategy, made.save_strategy, made.logging_strategy} == {"no"}
    assert made.report_to == [] and made.bf16 is False and recipe.training["gradient_checkpointing"] is False


def test_numbers_of_either_kind_objects_and_defaults_are_taken_as_they_are():
    arguments = SpecTrainingArguments("o", use_cpu=True)
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments) if field.init}
    taken = with_training(**given).training
    assert {name: taken[name] for name in given} == given
    kept = {"learning_rate": 1, "save_steps": 0.5, "eval_strategy": IntervalStrategy.EPOCH, "lr_scheduler_kwargs": {}}
    assert with_training(**kept).training == {"output_dir": "o", **kept}
    assert with_training(resume_from_checkpoint=True).training["resume_from_checkpoint"] is True
    whole = with_training(max_steps=1e3).training["max_steps"]
    assert whole == 1000 and type(whole) is int


def test_a_reporter_that_is_not_installed_is_named_with_its_package_before_anything_loads(monkeypatch):
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["mlflow"])
    for name in ("wandb", "tensorboard"):
        for given in (name, ["mlflow", name]):
            with pytest.raises(RecipeError, match=f"training.report_to={name}: {name} is not installed; pip install"):
                training_arguments(with_training(report_to=given))
    with pytest.raises(
        RecipeError, match=r"report_to=flyte: FlyteCallback requires flytekit.*training.report_to=none$"
    ):
        training_arguments(with_training(report_to="flyte"))
    with pytest.raises(RecipeError, match=r"unknown training.report_to 'wandbb'; did you mean 'wandb'"):
        training_arguments(with_training(report_to="wandbb"))
    assert training_arguments(with_training(report_to="none", use_cpu=True)).report_to == []


@pytest.mark.parametrize("options", [{"early_stopping": "soon"}, {"init_from": 3}, {"attn_implementation": 3}])
def test_other_options_of_a_recipe_have_types_too(options):
    with pytest.raises(RecipeError, match=f"{next(iter(options))}=.*: expected"):
        Recipe.from_dict(LEAST | options)
