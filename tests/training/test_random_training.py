"""Training with options drawn at random: a batch has the loss and gradients of its rows, however it is computed, and a
run ends with the same weights, however it is cut.

Other tests ask of each option by itself. A seed that fails is the number in the test's name.
"""

import copy
import random

import datasets
import pytest
import torch

from specheads.data.datasets import Collator, pack
from specheads.losses import objective
from specheads.models.spec_model import SpecModel
from tests.support.families import RECURRENT
from tests.support.random_calls import base_named
from tests.support.random_training import draw, draw_rows
from tests.support.trainers import logged, trainer_of, weights


def step(model, batch, items=None):
    """Loss and gradients by name, and the ranks in order. items: what the loss is divided by."""
    model.zero_grad()
    model.draw_seed = 7
    out = model(**batch, num_items_in_batch=items)
    assert out.loss.isfinite()
    if out.loss.requires_grad:
        out.loss.backward()
    trained = {name: p for name, p in model.head.named_parameters() if p.requires_grad}
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
    return {"loss": out.loss.detach(), **grads}, sorted([] if out.ranks is None else out.ranks.tolist())


def add(steps):
    found = list(steps)
    sums = {name: sum(each[name] for each, _ in found) for name in found[0][0]}
    return sums, sorted(rank for _, ranks in found for rank in ranks)


def assert_same(one, other, call, rtol=1e-4):
    """Softmax, norms and rotary positions of transformers are float32 in float64 too."""
    for name, value in one[0].items():
        gap, size = float((value - other[0][name]).norm()), float(value.norm())
        assert gap <= rtol * size + 1e-5, (call, name, gap, size)
    assert one[1] == other[1], call


@pytest.mark.parametrize("seed", range(400))
@pytest.mark.sampled(25)
def test_a_batch_has_the_loss_and_gradients_of_its_rows(seed, monkeypatch):
    call, model = draw(seed)
    batch, items = Collator(0)(call.rows), max(call.learnt, 1)
    with torch.no_grad():
        seen = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        if model.base(**seen).logits.isnan().any():
            return  # in float64 transformers' own Gemma-2 gives NaN for rows with much padding
    whole = step(model, batch)
    assert all(p.grad is None for p in model.base.parameters())
    assert_same(whole, add(step(model, Collator(0)([row]), items) for row in call.rows), (call, "rows alone"))
    model.activation_checkpointing_enable()
    assert_same(whole, step(model, batch), (call, "recomputed"))
    model.activation_checkpointing_disable()
    with monkeypatch.context() as patch:
        patch.setattr(objective, "rows_of_chunk", lambda *_: 1 + seed % 5)
        assert_same(whole, step(model, batch), (call, "in chunks"))
    if call.samples:
        return
    if call.base not in RECURRENT:
        packed = Collator(0)(pack(call.rows, max(len(row["input_ids"]) for row in call.rows) + 4))
        assert_same(whole, step(model, packed), (call, "packed"))
    if "dpace" in call.options or call.kind == "parallel" or not call.learnt:
        return  # where drafts of a start depend on one another
    cut = [
        {"input_ids": row["input_ids"][: i + 1], "labels": [-100] * i + [label]}
        for row in call.rows for i, label in enumerate(row["labels"]) if label != -100
    ]  # fmt: skip
    alone, _ = add(step(model, Collator(0)([row]), items) for row in cut[:40])
    if len(cut) <= 40:
        assert_same((whole[0], []), (alone, []), (call, "token by token"))


def draw_run(seed):
    """A training, its rows, a stream or not, and the arguments of a run: those of saving and evaluation apart."""
    coin = random.Random(seed)
    call, _ = draw(10_000 + seed)
    while call.learnt == 0 or call.base not in ("Llama", "Qwen3", "GPT-2", "Ministral", "OPT", "Gemma-3"):
        call, _ = draw(coin.randrange(10**6))
    rows = call.rows + draw_rows(coin, coin.choice((1, 2, 6)))
    rows = pack(rows, 30) if coin.random() < 0.3 else rows
    arguments = {
        "per_device_train_batch_size": coin.choice((1, 2, 3)), "gradient_accumulation_steps": coin.choice((1, 2, 3)),
        "max_steps": coin.choice((2, 4, 5)), "logging_steps": coin.choice((1, 2, 3)), "seed": coin.choice((0, 5)),
        "lr_scheduler_type": coin.choice(("linear", "constant", "cosine")), "max_grad_norm": coin.choice((1.0, 0.1)),
    }  # fmt: skip
    for extra in (
        {"optim": "adafactor"}, {"muon": True}, {"head_lr_groups": {"norm|weight": 0.5}}, {"warmup_steps": 2},
        {"data_seed": 77}, {"dataloader_drop_last": True}, {"logging_first_step": True}, {"weight_decay": 0.1},
    ):  # fmt: skip
        if coin.random() < 0.2 and not (extra.get("muon") and "optim" in arguments):
            arguments |= extra
    if arguments["per_device_train_batch_size"] > len(rows):
        arguments.pop("dataloader_drop_last", None)
    return call, rows, coin.choice((None, None, "stream")), arguments


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.sampled(30)
def test_a_run_ends_with_the_same_head_however_it_is_cut(seed, tmp_path):
    call, rows, streamed, arguments = draw_run(seed)
    base, coin = base_named(call.base), random.Random(seed)
    held_out = draw_rows(coin, 3)
    while not any(label != -100 for row in held_out for label in row["labels"][1:]):  # which is refused
        held_out = draw_rows(coin, 3)
    before = copy.deepcopy(base.state_dict())

    def run(name, resume=None, **changed):
        data = datasets.Dataset.from_list(rows)
        data = data.to_iterable_dataset() if streamed else data
        options = {**arguments, **changed}
        trainer = trainer_of(tmp_path / name, call.model(), data=data, evaluation=held_out, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def assert_weights(other, rtol, what):
        found = weights(other.model)
        for name, tensor in weights(whole.model).items():
            gap, size = (float(each.double().norm()) for each in (tensor.double() - found[name].double(), tensor))
            assert gap <= rtol * size, (call, arguments, streamed, what, name, gap, size)

    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    whole = run("whole", **saving, per_device_eval_batch_size=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    at = 1 + seed % (arguments["max_steps"] - 1)
    resumed = run("whole", str(tmp_path / "whole" / f"checkpoint-{at}"), **saving, per_device_eval_batch_size=2)
    assert_weights(resumed, 0, f"resumed at {at}")
    assert logged(resumed) == logged(whole), (call, arguments, streamed)
    assert_weights(run("plain", eval_strategy="no"), 0, "without evaluations")
    if not {"muon", "dataloader_drop_last"} & arguments.keys():  # Muon rounds to float32
        together = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
        at_once = run("at once", per_device_train_batch_size=together, gradient_accumulation_steps=1)
        assert_weights(at_once, 1e-3, "without accumulation")
    figures, batch = whole.evaluate(), Collator(0)(held_out)
    assert figures["eval_loss"] == pytest.approx(float(whole.model.eval()(**batch).loss), rel=1e-4, abs=1e-6)
    whole.save_model(str(tmp_path / "head"))
    again = SpecModel.from_pretrained(tmp_path / "head", base=base)
    assert torch.equal(again(**batch).loss, whole.model(**batch).loss), (call, arguments)
    prompt, options = torch.tensor([rows[0]["input_ids"][:4]]), {"max_new_tokens": 8, "do_sample": False}
    expected = base.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(again.generate(prompt, draft=True, **options), expected), call
