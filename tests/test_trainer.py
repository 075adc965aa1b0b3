"""SpecTrainer: the loss of a global batch however it is cut, exact resume, checkpoints of the head alone."""

import io
import json
from typing import ClassVar

import datasets
import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file
from torch.optim import AdamW
from tqdm import tqdm
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from specheads.convert import convert
from specheads.data import Collator
from specheads.metrics import accepted_length
from specheads.optim import MuonAdamW, parameter_groups
from specheads.saved_head import CheckpointError
from specheads.spec_model import SpecModel
from specheads.trainer import AcceptanceProgress, SpecTrainer, SpecTrainingArguments

OPTIONS = {
    "medusa": {"num_heads": 2}, "hydra": {"num_heads": 2, "prefix_layer": True}, "eagle": {"metric_steps": 2},
    "eagle3": {"steps": 2, "draft_vocab_size": 60},
    "parallel": {"block_size": 2, "markov_rank": 4, "anchors": 3, "confidence": True, "draft_vocab_size": 60},
}  # fmt: skip


def model_of(kind="eagle3", seed=0, **options):
    base = tiny_llama(num_hidden_layers=3)
    torch.manual_seed(seed)
    return convert(base, kind, **{**OPTIONS[kind], **options})


def rows(count=12, seed=0, lengths=(4, 14)):
    """Rows of unequal lengths, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(*lengths, (1,), generator=generator))
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return datasets.Dataset.from_list(made)


def trainer_of(folder, model=None, evaluation=None, callbacks=None, data=None, **options):
    settings = {
        "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "seed": 5, "lr_scheduler_type": "linear",
    }  # fmt: skip
    arguments = SpecTrainingArguments(output_dir=str(folder), **{**settings, **options})
    return SpecTrainer(
        model or model_of(), arguments, train_dataset=data or rows(), eval_dataset=evaluation,
        data_collator=Collator(0), callbacks=callbacks,
    )  # fmt: skip


def logged(trainer, *names):
    """What was logged in training: a dict for each log, without times."""
    kept = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if not names or k in names} for entry in kept]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.head.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("named", ["labels", "loss_mask"])
@pytest.mark.parametrize("kind", OPTIONS)
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
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            assert parts[name] == pytest.approx(value, rel=2e-5), name  # float32 sums in another order


@pytest.mark.parametrize(
    ("kind", "muon"), [("medusa", False), ("hydra", True), ("eagle", False), ("eagle3", True), ("parallel", True)]
)
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
        own = losses[saved:]  # the run's own figure is of the steps it took itself
        assert resumed.state.log_history[-1]["train_loss"] == pytest.approx(sum(own) / len(own), rel=1e-5)


def test_a_checkpoint_holds_the_head_and_the_trainer_state_only(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json",
        "unlogged_0.json",
    }  # fmt: skip
    assert all(name.startswith("head.") for name in load_file(folder / "model.safetensors"))
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(state["state"]) == len(list(trainer.model.head.parameters()))
    restored = SpecModel.from_pretrained(folder, base=trainer.model.base)
    assert same(weights(restored), weights(trainer.model))


def test_a_checkpoint_of_another_head_is_refused(tmp_path):
    trainer_of(tmp_path, model_of("medusa"), save_strategy="steps", save_steps=4).train()
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


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", OPTIONS)
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
        accuracy = float((whole.ranks[:, depth] == 0).double().mean())
        assert metrics[f"eval_accuracy_depth_{depth + 1}"] == pytest.approx(accuracy, abs=1e-12)


def test_logs_cover_every_step_since_the_last_log(tmp_path):
    each = trainer_of(tmp_path, logging_steps=1)
    both = trainer_of(tmp_path, logging_steps=2)
    seen = []
    add = type(each._training_meter).add

    def spy(meter, ranks, terms, num_items, tokens):
        seen.append((ranks, {k: v.clone() for k, v in terms.items()}, int(tokens)))
        add(meter, ranks, terms, num_items, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(each._training_meter), "add", spy)
        each.train()
    both.train()
    assert len(seen) == 4
    for i, entry in enumerate(logged(both)):
        pair = seen[2 * i : 2 * i + 2]
        assert entry["accepted_length"] == pytest.approx(accepted_length(torch.cat([ranks for ranks, _, _ in pair])))
        summed = sum(float(terms["loss_depth_1"]) * tokens for _, terms, tokens in pair)
        mean = summed / sum(tokens for *_, tokens in pair)
        assert entry["loss_depth_1"] == pytest.approx(mean, rel=1e-6)


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


def test_learning_rates_go_by_parameter_name(tmp_path):
    model = model_of()
    before = weights(model)
    trainer = trainer_of(
        tmp_path, model, head_lr_groups={"lm_head": 0.0, r"norm": 4.0}, weight_decay=0.1, lr_scheduler_type="constant"
    )
    trainer.train()
    rates = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    assert rates["head.lm_head.weight"] == (0.0, 0.1)
    assert rates["head.norm.weight"] == (pytest.approx(4e-2), 0.0)
    assert rates["head.fc.weight"] == (1e-2, 0.1)
    assert len(rates) == len(list(model.head.parameters()))
    after = weights(model)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert not torch.equal(after["fc.weight"], before["fc.weight"])


def test_learning_rate_options_that_cannot_work_say_why(tmp_path):
    with pytest.raises(ValueError, match="'lm_haed' is found in no parameter; the head's are head"):
        trainer_of(tmp_path, head_lr_groups={"lm_haed": 2.0}).create_optimizer()
    with pytest.raises(ValueError, match="is no regular expression"):
        trainer_of(tmp_path, head_lr_groups={"(": 2.0})
    with pytest.raises(ValueError, match="factor -1"):
        trainer_of(tmp_path, head_lr_groups={"fc": -1})
    with pytest.raises(ValueError, match="muon=true goes with"):
        trainer_of(tmp_path, muon=True, optim="sgd")
    assert trainer_of(tmp_path, head_lr_groups=json.dumps({"fc": 2})).args.lr_multipliers == {"fc": 2}


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"hidden": torch.nn.Linear(6, 4), "lm_head": torch.nn.Linear(4, 5, bias=False)})


def grouped(module):
    return parameter_groups(
        module.named_parameters(), learning_rate=0.1, weight_decay=0.01, decayed=["hidden.weight", "lm_head.weight"],
        multipliers={},
    )  # fmt: skip


def test_muon_and_adamw_step_as_they_do_apart():
    ours, apart = two_layers(), two_layers()
    optimizer = MuonAdamW(grouped(ours))
    muon = torch.optim.Muon([apart["hidden"].weight], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    decayed = {"params": [apart["lm_head"].weight], "weight_decay": 0.01}
    adamw = AdamW([decayed, {"params": [apart["hidden"].bias], "weight_decay": 0.0}], lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, muon, adamw)]
    for step in range(5):
        if step == 2:  # the state goes through a file, as in a resumed run
            kept = optimizer.state_dict()
            optimizer = MuonAdamW(grouped(ours))
            buffer = io.BytesIO()
            torch.save(kept, buffer)
            buffer.seek(0)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
            schedulers[0].optimizer = optimizer
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, 6, generator=generator)
        for module in (ours, apart):
            module.zero_grad()
            module["lm_head"](module["hidden"](x)).square().sum().backward()
        for each in (optimizer, muon, adamw, *schedulers):
            each.step()
    for (name, mine), theirs in zip(ours.named_parameters(), apart.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_too_short_to_draft_from_are_a_loss_of_0_under_either_trainer(kind, length, tmp_path):
    row = {"input_ids": [5, 6][:length], "labels": [-100, 6][:length]}
    trainer = trainer_of(tmp_path, model_of(kind), data=datasets.Dataset.from_list([row] * 4), max_steps=2)
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


class Tracker(TrainerCallback):
    """What a tracker is sent, and what it is told of the run at the start."""

    made: ClassVar = []

    def __init__(self):
        self.sent, self.run = [], None
        self.made.append(self)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.run = {**args.to_dict(), **model.config.to_dict()}  # what wandb and tensorboard record of it

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sent.append((state.global_step, dict(logs)))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_tracker_is_sent_accepted_length_and_accuracy_by_depth(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)  # as report_to finds an installed one
    monkeypatch.setattr(Tracker, "made", [])
    more = {"steps": 2} if kind == "eagle" else {}  # it is trained on one depth, unless told
    trainer = trainer_of(
        tmp_path, model_of(kind, **more), rows(4, 1, (6, 12)), report_to="tensorboard", max_steps=6, logging_steps=2,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer.train()
    (tracker,) = Tracker.made
    assert json.dumps(tracker.run["head"]) and tracker.run["head"]["kind"] == kind
    training = [(step, logs) for step, logs in tracker.sent if "loss" in logs]
    evaluation = [(step, logs) for step, logs in tracker.sent if "eval_loss" in logs]
    assert [step for step, _ in training] == [2, 4, 6] and [step for step, _ in evaluation] == [3, 6]
    for prefix, sent in (("", training), ("eval_", evaluation)):
        for _, logs in sent:
            numbers = [logs[prefix + "accepted_length"], *(logs[f"{prefix}accuracy_depth_{k}"] for k in (1, 2))]
            assert all(isinstance(number, float) for number in numbers)
            assert 1 <= numbers[0] <= 1 + sum(numbers[1:])
            assert any(name.startswith(prefix + start) for name in logs for start in ("loss_depth_", "law"))
    assert [logs for _, logs in training] == [
        {k: v for k, v in entry.items() if k != "step"} for entry in logged(trainer)
    ]  # fmt: skip


def test_the_progress_bar_shows_the_accepted_length(tmp_path):
    trainer = trainer_of(tmp_path, disable_tqdm=False)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, AcceptanceProgress)]
    shown = io.StringIO()
    callback.training_bar = tqdm(total=4, file=shown)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 2.0, "accepted_length": 1.75})
    assert "accepted=1.75" in shown.getvalue() and "loss=2" in shown.getvalue()


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="SpecTrainer trains a SpecModel, not LlamaForCausalLM"):
        trainer_of(tmp_path, tiny_llama(num_hidden_layers=3))
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="one process sees 2 GPUs"):
        SpecTrainer(trainer.model, trainer.args)
    trainer = trainer_of(tmp_path, remove_unused_columns=False)
    with pytest.raises(ValueError, match="expected labels or loss_mask"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.zeros(1, 3, dtype=torch.long)})
