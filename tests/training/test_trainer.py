"""SpecTrainer: the loss of a global batch however it is cut, exact resume, checkpoints of the head alone."""

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from specheads import convert
from specheads.data.datasets import Collator
from specheads.losses.metrics import accepted_length
from specheads.losses.targets import ENDED
from specheads.models.base.fingerprint import record_base
from specheads.models.config import SpecConfig
from specheads.models.files import CheckpointError
from specheads.models.spec_model import SpecModel
from specheads.training.distributed.resume import ResumeError, refuse_other_model
from specheads.training.trainer.trainer import SpecTrainer
from tests.support.families import RECURRENT, build
from tests.support.tiny_models import tiny_llama
from tests.support.trainers import OPTIONS, logged, model_of, rows, same, trainer_of, weights


@pytest.mark.parametrize("named", ["labels", "loss_mask"])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sampled(2)
def test_gradient_accumulation_gives_the_loss_of_the_whole_batch(kind, named, tmp_path):
    def collate(batch):
        made = Collator(0)(batch)
        return made if named == "labels" else {"loss_mask": made.pop("labels") != -100, **made}

    runs = []
    quiet = {"eagle": {"noise": 0.0}, "parallel": {"anchors": 99}}.get(kind, {})  # what is drawn batch by batch
    for size, steps in ((4, 1), (1, 4)):
        trainer = trainer_of(
            tmp_path, model_of(kind, **quiet), per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            max_steps=3, optim="sgd", learning_rate=0.1, remove_unused_columns=False,
        )  # fmt: skip
        trainer.data_collator = collate
        trainer.train()
        runs.append(logged(trainer))
    assert len(runs[0]) == 3
    for whole, parts in zip(*runs, strict=True):
        assert parts.pop("accepted_length_error") >= 0  # of four batches; the whole is one
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            assert parts[name] == pytest.approx(value, rel=2e-5), name  # float32 sums in another order


@pytest.mark.parametrize(
    ("kind", "muon"), [("medusa", False), ("hydra", True), ("eagle", False), ("eagle3", True), ("parallel", True)]
)
@pytest.mark.sampled(2)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(kind, muon, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "muon": muon}
    drawn = {"anchors": 2} if kind in ("medusa", "hydra", "eagle3") else {}  # what others draw is in their defaults
    whole = trainer_of(tmp_path / "run", model_of(kind, **drawn), **options)
    whole.train()
    # Another start and another seed of the generator: everything must come from the checkpoint.
    resumed = trainer_of(tmp_path / "run", model_of(kind, seed=9, **drawn), **options)
    torch.manual_seed(123)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert [entry["step"] for entry in logged(whole)] == [1, 2, 3, 4, 5, 6]
    assert logged(resumed) == logged(whole)
    assert same(weights(resumed.model), weights(whole.model))


def test_rows_grouped_by_length_come_in_the_same_order_to_a_run_resumed_in_its_second_epoch(tmp_path):
    options = {
        "max_steps": 10, "save_strategy": "steps", "save_steps": 8, "train_sampling_strategy": "group_by_length",
    }  # fmt: skip
    whole = trainer_of(tmp_path, model_of("medusa"), **options)
    whole.train()
    resumed = trainer_of(tmp_path, model_of("medusa", seed=9), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert logged(resumed) == logged(whole)
    sampler = whole._get_train_sampler()
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again != list(sampler), "each epoch has an order of its own"


def test_a_draft_vocabulary_that_nobody_counted_is_told(tmp_path, caplog):
    model = model_of()
    trainer_of(tmp_path, model)
    assert "drafts no tokens but the first 60 of 97" in caplog.text and "set_draft_vocabulary(token_c" in caplog.text
    caplog.clear()
    model.head.set_draft_vocabulary(torch.arange(97), model.base)
    trainer_of(tmp_path, model)
    trainer_of(tmp_path, model_of("medusa"))
    assert not caplog.text


def test_a_seed_of_all_its_bits_leaves_room_for_the_step(tmp_path):
    trainer = trainer_of(tmp_path, model_of(anchors=2), seed=2**32 - 1, max_steps=2)
    trainer.train()
    assert len(logged(trainer)) == 2


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer_of(folder, max_steps=2, save_strategy="steps", save_steps=2).train()
    return folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"norm_before_residual": False}, {}, r"another head .*\(norm_before_residual is True, not False\)"),
        ({"taps": (0, 1, 2)}, {}, r"taps is \[.*\], not \[0, 1, 2\]"),
        ({"steps": 3}, {}, "steps is 2, not 3"),
        ({"kind": "eagle"}, {}, "kind is 'eagle3', not 'eagle'"),
        ({"base": {"initializer_range": 0.2}}, {}, "the base has other weights"),
        ({}, {"seed": 1}, r"other data \(12 rows, checksum \w+, of labels \w+; here 12 rows, checksum \w+, of"),
        ({}, {"masked": 2}, r"other data \(12 rows, checksum (\w+), of labels .*; here 12 rows, checksum \1, of"),
        ({}, {"count": 14}, "12 rows, .*; here 14 rows"),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(model, data, message, stopped, tmp_path):
    with pytest.raises(ResumeError, match=message) as caught:
        trainer_of(tmp_path, model_of(**model), data=rows(**data)).train(resume_from_checkpoint=str(stopped))
    assert f"head=null init_from={stopped}" in str(caught.value)


def test_a_checkpoint_of_the_head_alone_is_not_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trainer_of(tmp_path, **options).train()
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(ResumeError, match=r"no optimizer\.pt, as training\.save_only_model=true") as caught:
        trainer_of(tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))
    assert f"head=null init_from={checkpoint}" in str(caught.value)


def test_a_run_resumes_with_another_tree_and_where_asked_to_with_other_data(stopped, tmp_path):
    for model, options in ({"tree": "chain:2", "draft_depth": 3}, {}), ({}, {"ignore_data_skip": True}):
        data = rows(seed=1) if options else rows()
        resumed = trainer_of(tmp_path, model_of(**model), data=data, **options)
        resumed.train(resume_from_checkpoint=str(stopped))
        assert [entry["step"] for entry in logged(resumed)] == [1, 2, 3, 4]


def test_a_checkpoint_is_not_of_another_base_in_float16(stopped):
    model = model_of()
    refuse_other_model(record_base(SpecConfig.of(model.head.config), model.base.half()), stopped)


def test_a_checkpoint_of_another_order_of_the_rows_is_refused_unless_they_begin_anew(stopped, tmp_path):
    with pytest.raises(ResumeError, match=r"by the seed 5, and this one's is 6: give training\.data_seed=5") as caught:
        trainer_of(tmp_path, seed=6).train(resume_from_checkpoint=str(stopped))
    assert f"head=null init_from={stopped}" in str(caught.value)
    for options in ({"data_seed": 5}, {"ignore_data_skip": True}):
        trainer_of(tmp_path, seed=6, **options).train(resume_from_checkpoint=str(stopped))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_resumed_between_two_logs_logs_what_the_uninterrupted_one_does(accumulated, tmp_path):
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    options["gradient_accumulation_steps"] = accumulated
    whole, each = (
        trainer_of(tmp_path / "run", **options),
        trainer_of(tmp_path / "each", **{**options, "logging_steps": 1}),
    )
    whole.train()
    each.train()
    assert [entry["step"] for entry in logged(whole)] == [3, 6]
    losses = [entry["loss"] for entry in logged(each)]
    for saved in (2, 4, 6):
        resumed = trainer_of(tmp_path / "run", model_of(seed=9), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{saved}"))
        assert logged(resumed) == logged(whole)
        assert same(weights(resumed.model), weights(whole.model))
        # The run's own figure is of the losses it saw itself, which transformers 5.17 divides by all steps.
        own, found = sum(losses[saved:]), resumed.state.log_history[-1]["train_loss"]
        assert found == pytest.approx(own / (7 - saved), rel=1e-5) or found == pytest.approx(own / 7, rel=1e-5)


def test_a_checkpoint_holds_the_head_and_the_trainer_state_only(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json",
        "unlogged_0.json", "README.md",
    }  # fmt: skip
    assert all(name.startswith("head.") for name in load_file(folder / "model.safetensors"))
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(state["state"]) == len(list(trainer.model.head.parameters()))
    restored = SpecModel.from_pretrained(folder, base=trainer.model.base)
    assert same(weights(restored), weights(trainer.model))


def test_a_checkpoint_that_does_not_say_that_it_is_of_another_head_is_refused(tmp_path):
    trainer_of(tmp_path, model_of("medusa"), save_strategy="steps", save_steps=4).train()
    (tmp_path / "checkpoint-4" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not fit this head: missing"):
        trainer_of(tmp_path, model_of("eagle")).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_plain_trainer_trains_saves_and_resumes(tmp_path):
    def plain(seed=0):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
            logging_steps=1, save_steps=2, report_to="none", disable_tqdm=True, eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        return Trainer(
            model_of(seed=seed), arguments, train_dataset=rows(), eval_dataset=rows(3, 1), data_collator=Collator(0)
        )

    whole, resumed = plain(), plain(seed=9)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [e["loss"] for e in logged(resumed)] == [e["loss"] for e in logged(whole)]
    assert same(weights(resumed.model), weights(whole.model))
    assert all(name.startswith("head.") for name in load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert "eval_loss" in whole.evaluate()


@pytest.mark.parametrize("made_by", ["a collator", "a transform"])
def test_rows_that_become_tokens_when_they_are_read_are_saved_with_a_checkpoint_and_resumed(made_by, tmp_path):
    def tokens(texts):
        ids = [[3 + ord(letter) % 90 for letter in text] for text in texts]
        return {"input_ids": ids, "labels": ids}

    def collate(batch):
        made = tokens([row["text"] for row in batch])
        return Collator(0)([{"input_ids": ids, "labels": ids} for ids in made["labels"]])

    texts = [{"text": f"row number {i}"} for i in range(8)]
    read = datasets.Dataset.from_list(texts).with_transform(lambda batch: tokens(batch["text"]))
    for start, steps in ((None, 2), (str(tmp_path / "checkpoint-2"), 3)):
        trainer = trainer_of(
            tmp_path, model_of("medusa"), data=read if made_by == "a transform" else texts, save_strategy="steps",
            save_steps=2, max_steps=steps, remove_unused_columns=False,
        )  # fmt: skip
        if made_by == "a collator":
            trainer.data_collator = collate
        trainer.train(resume_from_checkpoint=start)
        assert trainer.state.global_step == steps


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sampled(2)
def test_evaluation_is_exact_whatever_the_batches(kind, size, tmp_path):
    model, data = model_of(kind), rows(5, seed=3, lengths=(5, 12))
    metrics = trainer_of(tmp_path, model, data, per_device_eval_batch_size=size).evaluate()
    with torch.no_grad():
        whole = model.eval()(**Collator(0)(list(data)))
    assert metrics["eval_loss"] == pytest.approx(float(whole.loss), rel=1e-5)
    assert metrics["eval_accepted_length"] == pytest.approx(accepted_length(whole.ranks), abs=1e-12)
    for name, term in whole.terms.items():
        assert metrics[f"eval_{name}"] == pytest.approx(float(term), rel=1e-5)
    for depth in range(2):
        ranks = whole.ranks[:, depth]
        accuracy = float((ranks[ranks != ENDED] == 0).double().mean())
        assert metrics[f"eval_accuracy_depth_{depth + 1}"] == pytest.approx(accuracy, abs=1e-12)


def test_accepted_length_chooses_the_best_checkpoint_and_stops_early(tmp_path):
    trainer = trainer_of(
        tmp_path, evaluation=rows(4, 1, (6, 12)), max_steps=12, save_strategy="steps", save_steps=1, learning_rate=0.0,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="accepted_length", load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    lengths = iter([1.5, 1.9, 1.7, 1.6, 2.5])
    report = trainer._report

    def scripted(meter):
        made = report(meter)
        return {**made, "accepted_length": next(lengths)} if meter is trainer._evaluation_meter else made

    trainer._report = scripted
    trainer.train()
    assert trainer.state.global_step == 4  # 1.9 was not beaten twice
    assert trainer.state.best_metric == 1.9 and trainer.state.best_model_checkpoint.endswith("checkpoint-2")


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sampled(2)
def test_rows_too_short_to_draft_from_are_a_loss_of_0_under_either_trainer(kind, length, tmp_path):
    row = {"input_ids": [5, 6][:length], "labels": [-100, 6][:length]}
    trainer = trainer_of(tmp_path, model_of(kind), max_steps=2)
    trainer.train_dataset = datasets.Dataset.from_list([row] * 4)  # given at its start, some would be refused
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    for each in (
        trainer,
        Trainer(model_of(kind), plain, train_dataset=trainer.train_dataset, data_collator=Collator(0)),
    ):
        before = weights(each.model)
        each.train()
        assert [entry["loss"] for entry in logged(each)] == [0.0, 0.0]
        assert all(entry["grad_norm"] == 0 for entry in logged(each))
        assert all(p.grad is None or not p.grad.any() for p in each.model.head.parameters())
        assert same(weights(each.model), before)


def test_a_packed_batch_is_refused_where_attention_ignores_its_mask():
    """Flash attention would let documents see one another, and say nothing."""
    model = model_of("medusa")
    ids, documents = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[1, 1, 1, 2, 2, 2]])
    model(ids, labels=ids, document_ids=documents)
    model.base.set_attn_implementation("eager")
    model(ids, labels=ids, document_ids=documents)
    model.base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2 .* packing=false, or attn_implementation=sdpa"):
        model(ids, labels=ids, document_ids=documents)


def test_a_packed_batch_is_refused_where_layers_carry_a_state():
    model = convert(build(*RECURRENT["LFM2"]), "medusa")
    ids, documents = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[1, 1, 1, 2, 2, 2]])
    model(ids, labels=ids)
    with pytest.raises(ValueError, match=r"recurrent layers of Lfm2ForCausalLM .* packing=false"):
        model(ids, labels=ids, document_ids=documents)


def test_rows_that_make_no_whole_batch_are_refused_where_others_are_dropped(tmp_path):
    options = {"dataloader_drop_last": True, "per_device_train_batch_size": 12, "max_steps": 1}
    assert trainer_of(tmp_path, data=rows(12), **options).train().global_step == 1
    with pytest.raises(ValueError, match=r"dataloader_drop_last=true .* the 11 rows make no batch of 12: leave"):
        trainer_of(tmp_path, data=rows(11), **options).train()


def test_evaluations_have_all_rows_where_training_drops_the_last_batch(tmp_path):
    options = {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "per_device_eval_batch_size": 4}
    dropping = trainer_of(tmp_path, evaluation=rows(6, 1), **options, max_steps=5)
    figures = dropping.evaluate()
    assert figures["eval_loss"] == pytest.approx(float(dropping.model(**Collator(0)(rows(6, 1))).loss), rel=1e-4)
    assert "eval_loss" in dropping.evaluate(rows(3, 1))
    dropping.train()
    assert dropping.state.epoch == pytest.approx(2.5)  # two steps of five an epoch, of twelve rows


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="SpecTrainer trains a SpecModel, not LlamaForCausalLM"):
        trainer_of(tmp_path, tiny_llama(num_hidden_layers=3))
    trainer = trainer_of(tmp_path)
    with pytest.raises(TypeError, match=r"args must be specheads\.SpecTrainingArguments, .*; got TrainingArguments"):
        SpecTrainer(trainer.model, TrainingArguments(str(tmp_path), use_cpu=True))
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        with pytest.raises(ValueError, match=f"{name} would never be called"):
            SpecTrainer(trainer.model, trainer.args, **{name: lambda *_: {}})
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="one process sees 2 GPUs"):
        SpecTrainer(trainer.model, trainer.args)
    trainer = trainer_of(tmp_path, remove_unused_columns=False)
    with pytest.raises(ValueError, match="expected labels or loss_mask"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.zeros(1, 3, dtype=torch.long)})


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sampled(2)
def test_bf16_trains_near_float32_and_leaves_the_head_in_it(kind, tmp_path):
    seen = []
    # Rounding moves the base's likeliest token in and out of a draft vocabulary, and targets with it.
    whole = {"draft_vocab_size": None} if "draft_vocab_size" in OPTIONS[kind] else {}
    for bf16 in (False, True):
        trainer = trainer_of(tmp_path / str(bf16), model_of(kind, **whole), bf16=bf16, learning_rate=1e-3)
        trainer.train()
        assert {p.dtype for p in trainer.model.head.parameters()} == {torch.float32}
        seen.append([entry["loss"] for entry in logged(trainer, "loss")])
    assert seen[1] == pytest.approx(seen[0], rel=0.03) and seen[1] != seen[0]
