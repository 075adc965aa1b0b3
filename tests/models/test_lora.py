"""Adapters on the base learn together with the head (Medusa-2), are saved and restored with it, and decode."""

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specheads.data.datasets import Collator
from specheads.losses.teacher import gives_logits
from specheads.models.base.lora import JointConfig, adapters
from specheads.models.convert import convert, load_head
from specheads.models.files import CheckpointError
from specheads.models.named import Models
from specheads.models.spec_model import SpecModel
from specheads.training.recipe.recipe import RecipeError, read_recipe
from specheads.training.trainer.trainer import SpecTrainer, SpecTrainingArguments
from tests.reference import slow_heads
from tests.reference.slow_heads import DEFAULTS, SLOW, rows
from tests.support.families import FAMILIES, build
from tests.support.heads_on_disk import IDS
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama
from tests.support.training_runs import overrides
from train import heads

LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0}


def joint_model(kind="medusa", **lora):
    model = convert(
        tiny_llama(num_hidden_layers=2).double(), kind, dtype=torch.float64, lora={**LORA, **lora}, **DEFAULTS[kind]
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters(model.base):
            parameter.data = torch.randn_like(parameter, dtype=torch.float64) * 0.2
    return model


def test_new_adapters_change_nothing_and_learn_with_the_head_alone():
    base = tiny_llama(num_hidden_layers=2)
    plain = copy.deepcopy(base)
    model = convert(base, "medusa", lora=LORA, num_heads=2)
    batch = Collator(0)(rows(9, 7))
    torch.testing.assert_close(base(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits,
                               plain(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits)  # fmt: skip
    model.train()(**batch).loss.backward()
    learnt = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learnt == {n for n, _ in model.named_parameters() if n.startswith("head.") or ".lora_" in n}
    assert all((p.grad is not None) == (n in learnt) for n, p in model.named_parameters())
    # All linear layers of the base, but not its output matrix.
    assert sum(".lora_A" in name for name in learnt) == 2 * 7 and not any("lm_head.lora" in name for name in learnt)


def test_evaluations_of_a_head_whose_weight_rises_weigh_it_alike_throughout_the_run():
    model, batch, losses = joint_model(ramp="sine").eval(), Collator(0)(rows(9, 7)), []
    for progress in (0.0, 0.4, 1.0):
        model.progress = progress
        losses.append(model(**batch).loss.item())
    assert losses[0] == losses[1] == losses[2]
    model.train().progress = 0.0
    assert model(**batch).loss.item() < losses[0]


@pytest.mark.parametrize("base_loss", ["kl", "ce"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_loss_is_the_base_term_and_the_weighted_head_term(kind, base_loss, monkeypatch):
    model = joint_model(kind, base_loss=base_loss, head_weight=0.3, ramp="sine").train()
    data = rows(9, 7)
    batch = Collator(0)(data)
    model.progress = 0.4
    out = model(**batch)
    plain = tiny_llama(num_hidden_layers=2).double()
    total = tokens = 0
    for row in data:
        ids = torch.tensor([row["input_ids"]])
        own, before = model.base(ids).logits[0].log_softmax(-1), plain(ids).logits[0].log_softmax(-1)
        for t in range(len(row["input_ids"]) - 1):
            if row["labels"][t + 1] == -100:
                continue
            kl = (before[t].exp() * (before[t] - own[t])).sum()
            total = total + (kl if base_loss == "kl" else -own[t, row["input_ids"][t + 1]])
            tokens += 1
    base_term = total / tokens
    assert base_term > 0.01 and out.terms["base"].item() == pytest.approx(base_term.item(), rel=1e-5)
    # And the head's, from an implementation of its own, whose gradient reaches the adapters through the features.
    seen = slow_heads.taps

    def detached(model, ids):
        features, found = seen(model, ids)
        found.logits = found.logits.detach()
        return features, found

    monkeypatch.setattr(slow_heads, "taps", detached)
    head_loss = sum(SLOW[kind](model, row)[0] for row in data) / tokens
    expected = base_term + 0.3 * math.sin(math.pi / 2 * 0.4) * head_loss
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    learnt = [p for p in model.parameters() if p.requires_grad]
    slow = torch.autograd.grad(expected, learnt, allow_unused=True)
    for mine, other in zip(torch.autograd.grad(out.loss, learnt, allow_unused=True), slow, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_adapters_are_saved_restored_and_decode(tmp_path):
    model = joint_model("eagle3").eval()
    tiny_llama(num_hidden_layers=2).double().save_pretrained(tmp_path / "base")
    model.config.base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "head")
    again = SpecModel.from_pretrained(tmp_path / "head", dtype=torch.float64)
    assert again.joint == model.joint and len(adapters(again.base)) == len(adapters(model.base)) == 28
    saved, restored = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in (model, again))
    assert saved.keys() == restored.keys() and all(torch.equal(saved[name], restored[name]) for name in saved)
    batch = Collator(0)(rows(9, 7))
    with torch.no_grad():
        # Bit for bit on some CPUs, whose products do not depend on where in memory a matrix is.
        torch.testing.assert_close(again(**batch).loss, model(**batch).loss, rtol=1e-12, atol=0)
    ids = torch.tensor([rows(6)[0]["input_ids"]])
    text = again.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, model.base.generate(ids, max_new_tokens=12, do_sample=False))
    plain = tiny_llama(num_hidden_layers=2).double()
    assert not torch.equal(text, plain.generate(ids, max_new_tokens=12, do_sample=False)), "adapters were off"
    # Beside another base in memory, and saved again to the same bytes.
    beside = SpecModel.from_pretrained(tmp_path / "head", base=plain)
    assert torch.equal(beside.generate(ids, max_new_tokens=12, do_sample=False), text)
    beside.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").stat().st_size == (
        tmp_path / "head" / "model.safetensors"
    ).stat().st_size
    with pytest.raises(ValueError, match="has adapters"):
        SpecModel.from_pretrained(tmp_path / "head", base=beside.base)


def test_a_head_with_adapters_never_changes_a_target_unsaid(tmp_path, hf_log):
    base = tiny_llama(num_hidden_layers=2)
    base.save_pretrained(tmp_path / "base")
    convert(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "medusa", lora=LORA, num_heads=2).save_pretrained(
        tmp_path / "head"
    )
    names = list(base.state_dict())
    with pytest.raises(CheckpointError, match=r"adapters of its base.*start with it as MODEL"):
        Models(base, None).drafter(str(tmp_path / "head"))
    assert list(base.state_dict()) == names, "the target was changed"
    SpecModel.from_pretrained(tmp_path / "head")
    assert not hf_log.messages, "the base that is loaded with the head is its own"
    other = tiny_llama(num_hidden_layers=2, initializer_range=0.2)
    load_head(other, tmp_path / "head")
    differ, attached = hf_log.messages
    assert "weights differ" in differ and "will be right" not in differ
    assert "part of the LlamaForCausalLM given in memory from now on" in attached


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    model = joint_model()
    tiny_llama(num_hidden_layers=2).double().save_pretrained(tmp_path / "base")
    model.config.base_model_name_or_path = str(tmp_path / "base")
    recorded = model.config.joint
    model.config.joint = {**recorded, "r": 3}
    model.save_pretrained(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"lora_A.default.weight has shape \(2, 48\), and lora.r=3"):
        SpecModel.from_pretrained(tmp_path / "head")
    model.config.joint = recorded
    model.save_pretrained(tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match="adapters do not fit the base"):
        SpecModel.from_pretrained(tmp_path / "head")
    mine = tiny_llama(num_hidden_layers=2).double()
    with pytest.raises(CheckpointError, match="adapters do not fit the base"):
        SpecModel.from_pretrained(tmp_path / "head", base=mine)
    plain = tiny_llama(num_hidden_layers=2)
    assert mine.state_dict().keys() == plain.state_dict().keys(), "a base that is refused is left as it was"
    with pytest.raises(CheckpointError, match="does not hold the adapters"):
        model.save_pretrained(
            tmp_path / "x", state_dict={n: t for n, t in model.state_dict().items() if "lora" not in n}
        )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_resumes_to_the_same_adapters_and_head(dropout, tmp_path):
    data = rows(9, 12, 8, 11, 7, 10)

    def run(folder, trainer=SpecTrainer, resume=None, stop=None):
        arguments = SpecTrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=4, save_steps=2, per_device_train_batch_size=2,
            learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, logging_steps=1,
            head_lr_groups={r"^head\.": 4.0},
        )  # fmt: skip
        model = joint_model(ramp="sine", lora_dropout=dropout)
        made = trainer(model, arguments, train_dataset=data, data_collator=Collator(0))
        made.train(resume_from_checkpoint=resume)
        return model, made

    whole, trainer = run("whole")
    resumed, _ = run("resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in whole.head_state_dict().items():
        assert torch.equal(tensor, resumed.head_state_dict()[name]), name
    assert gives_logits(resumed.base)  # found out in a pass without dropout
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.0}  # linear decay to the end, in both groups
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-2, 4e-2}


def test_medusa_2_recipe_trains_and_keeps_near_the_base(material, tmp_path):
    options = [o for o in overrides(material, tmp_path / "out", 4) if not o.startswith("head.steps")]
    more = ["lora.r=2", "training.head_lr_groups={^head: 4.0}", "head.num_heads=2", "parity.max_new_tokens=12"]
    assert heads.main([str(ROOT / "recipes" / "medusa2.yaml"), *options, *more]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["parity_measured"] == results["parity_simulated"] and results["eval_base"] >= 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["joint"]["r"] == 2


@pytest.mark.parametrize("dropout", [0.0, 0.05])  # peft itself refuses the latter, with half of the adapters in place
def test_adapters_of_experts_are_refused_before_anything_is_trained(dropout, tmp_path):
    """They were trained and saved, and could not be loaded."""
    base = build(*FAMILIES["Qwen3-MoE"])
    names, logits = base.state_dict().keys(), base(input_ids=IDS).logits
    with pytest.raises(ValueError, match=r"'all-linear' adapts the experts of Qwen3MoeForCausalLM.* \[q_proj, "):
        convert(base, "medusa", lora={"r": 2, "lora_dropout": dropout})
    assert base.state_dict().keys() == names and torch.equal(base(input_ids=IDS).logits, logits)
    named = {"r": 2, "lora_dropout": dropout, "target_modules": ["q_proj", "o_proj"]}
    convert(base, "medusa", lora=named).save_pretrained(tmp_path)
    assert SpecModel.from_pretrained(tmp_path, base=build(*FAMILIES["Qwen3-MoE"])).joint == JointConfig.of(named)


def test_options_that_cannot_be_kept_are_refused(tmp_path):
    assert JointConfig.of(
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ) == (JointConfig(4, 8, 0.0, ("q_proj", "v_proj")))
    assert JointConfig.of(LoraConfig(r=4, lora_alpha=8)) == JointConfig(4, 8, 0.0)  # a task need not be named
    for other, name in (
        ({"use_dora": True, "task_type": "CAUSAL_LM"}, "use_dora"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
    ):
        with pytest.raises(ValueError, match=f"sets {name}, which"):
            JointConfig.of(LoraConfig(**other))
    for wrong in (
        {"r": 0},
        {"rr": 3},
        {"lora_dropout": 1},
        {"base_loss": "tv"},
        {"ramp": "cosine"},
        {"head_weight": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            JointConfig.of(wrong)
    with pytest.raises(RecipeError, match="lora puts new adapters"):
        read_recipe(ROOT / "recipes" / "medusa2.yaml", ["head=null", "init_from=x", f"training.output_dir={tmp_path}"])
