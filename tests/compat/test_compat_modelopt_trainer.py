"""specheads.compat.modelopt under transformers' Trainer, and a base whose head was not kept."""

import copy
import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

import specheads
from specheads import SpecConfig, SpecModel, SpecTrainer, SpecTrainingArguments
from specheads.compat import modelopt as mto
from specheads.compat import modelopt as mtsp
from specheads.compat.modelopt.plugins import supervised
from tests.support.modelopt_scripts import (
    EAGLE,
    IDS,
    MEDUSA,
    ROWS,
    greedy,
    padded,
    small,
    trainer_of,
)


@pytest.fixture(autouse=True)
def registered():
    """What enable_huggingface_checkpointing() changes is of the whole process."""
    yield
    AutoModelForCausalLM.register(SpecConfig, SpecModel, exist_ok=True)


def same_heads(one, other):
    own = other.head_state_dict()
    return all(torch.equal(tensor, own[name]) for name, tensor in one.head_state_dict().items())


@pytest.mark.parametrize("mode", [MEDUSA, EAGLE], ids=["medusa", "eagle"])
def test_trainer_trains_resumes_evaluates_saves_and_restores_the_held_object(mode, tmp_path):
    small().save_pretrained(tmp_path / "base")
    mto.enable_huggingface_checkpointing()

    def converted():
        torch.manual_seed(0)
        held = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        mtsp.convert(held, mode)
        return held

    model = converted()
    fresh = copy.deepcopy(model)
    trainer = trainer_of(model, tmp_path / "run", save_strategy="steps", save_steps=2)
    trainer._move_model_to_device(model, trainer.args.device)  # as their main.py does
    trainer.can_return_loss = True
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0] and not same_heads(model, fresh)
    for name, weight in fresh.base.state_dict().items():
        assert torch.equal(model.base.state_dict()[name], weight), name

    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    for resumed in (converted(), AutoModelForCausalLM.from_pretrained(checkpoint)):
        again = trainer_of(resumed, tmp_path / "again")
        again.train(resume_from_checkpoint=checkpoint)
        assert same_heads(resumed, model) and type(resumed) is type(model)

    evaluated = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        chosen = [model.eval()(**padded(ROWS[:3])).loss.item()]
    assert evaluated == pytest.approx(sum(chosen), rel=1e-4)
    trainer.save_state()
    trainer.save_model(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mto.save(model, str(tmp_path / "modelopt.pth"))
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert mto.restore(held, tmp_path / "modelopt.pth") is held
    for other in (loaded, held):
        assert same_heads(other, model) and type(other) is type(model)
        assert torch.equal(greedy(other), greedy(model))


def test_labels_count_alike_shifted_and_not():
    held = small()
    mtsp.convert(held, MEDUSA)
    batch = padded(ROWS)
    unshifted = torch.full_like(batch["labels"], -100)
    unshifted[:, 1:] = torch.where(batch["loss_mask"].bool(), batch["labels"], -100)[:, :-1]
    plain = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    wanted = SpecModel.forward(held, **plain, labels=unshifted).loss
    only_labels = batch["labels"].masked_fill(~batch["attention_mask"].bool(), -100)
    for given in (
        batch, {**batch, "num_items_in_batch": (batch["labels"] != -100).sum()}, {**plain, "labels": unshifted},
        {**plain, "labels": only_labels}, {**plain, "attention_mask": plain["attention_mask"].bool(),
        "labels": only_labels},
    ):  # fmt: skip
        torch.testing.assert_close(held(**given).loss, wanted)


def test_labels_of_another_text_are_refused():
    ids = torch.tensor([[5, 6, 7, 8]])
    assert supervised(ids, torch.tensor([[-100, 7, 8, -100]])).tolist() == [[False, False, True, True]]
    assert supervised(ids, torch.tensor([[-100, 6, 7, -100]])).tolist() == [[False, True, True, False]]
    with pytest.raises(ValueError, match="neither the tokens of input_ids"):
        supervised(ids, torch.tensor([[-100, 9, 7, 8]]))


# --- A base whose head was not kept ---


def test_a_trainer_of_the_base_says_that_the_head_was_not_kept(tmp_path):
    base = small()
    specheads.convert(base, "medusa")
    gc.collect()
    expected = r"LlamaForCausalLM was frozen by specheads.convert\(\), whose result was not kept; write model = convert"
    with pytest.raises(ValueError, match=expected):
        trainer_of(base, tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match=expected):
        SpecTrainer(base, SpecTrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_the_loss_of_a_frozen_base_is_read_as_ever():
    base = small()
    wanted = base(IDS, labels=IDS).loss.item()
    model = specheads.convert(base, "medusa")
    specheads.convert(base, "eagle3")
    assert len(base._forward_hooks) == 1
    with pytest.raises(ValueError, match="result was not kept"):
        copy.deepcopy(base)(IDS, labels=IDS).loss.backward()
    assert base(IDS, labels=IDS).loss.item() == wanted
    with torch.no_grad():
        assert not base(IDS, labels=IDS).loss.requires_grad
    model(IDS, labels=IDS).loss.backward()
    base.requires_grad_(True)
    base(IDS, labels=IDS).loss.backward()
    assert base.lm_head.weight.grad.abs().sum() > 0
