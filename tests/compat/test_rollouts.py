"""DraftedRollouts: a policy's generate() drafts while it trains, with the texts of plain sampling; the head follows.

TRL itself runs in the last tests, which are skipped without it.
"""

import copy
import math
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, Trainer, TrainingArguments

import specheads
from specheads import UnsupportedModel, convert
from specheads.compat.rollouts import DraftedRollouts
from tests.support.learnt_heads import learnt
from tests.support.prompts import padded
from tests.support.tiny_models import tiny_llama, with_adapter

ROWS = ([5, 6, 7, 8], [50, 9], [33, 34, 35, 36, 37, 38, 39])
PLAIN = {"do_sample": False, "max_new_tokens": 12}


def policy_and_head(kind="eagle3", **options):
    model = learnt(kind, **options)
    return model.base.requires_grad_(True), model.head


def move(policy, by=0.05):
    """What a trainer's step does to the weights: they change in place."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * by)


def test_texts_are_those_of_the_policy_as_it_is_now():
    """Against a copy of the policy that nothing has been cached for, after each change of its weights."""
    policy, head = policy_and_head("parallel", draft_vocab_size=40)  # with copies of the policy's output rows
    batch, config = padded(ROWS), GenerationConfig(max_new_tokens=12, do_sample=True, pad_token_id=0, eos_token_id=2)
    for options in ({"draft": "head", "batch_size": 2}, {"draft": "auto"}):
        rollouts = DraftedRollouts(head, every=None, **options)
        with rollouts.attached(policy):
            for _ in range(2):
                fresh = copy.deepcopy(policy)
                del fresh.generate
                assert torch.equal(policy.generate(**batch, **PLAIN), fresh.generate(**batch, **PLAIN)), options
                torch.manual_seed(3)
                with DraftedRollouts(head, every=None, draft=False).attached(fresh):
                    expected = fresh.generate(**batch, generation_config=config)
                torch.manual_seed(3)
                drafted = policy.generate(batch["input_ids"], config, attention_mask=batch["attention_mask"])
                assert torch.equal(drafted, expected), options
                rows = policy.lm_head.weight[head.target_ids]
                assert all(layer.weight.equal(rows) for layer in head.output_layers())
                move(policy)
            assert rollouts.figures()["rollout_tokens"] > 0
        assert "generate" not in vars(policy)


FALSE_ALARM = 1e-6  # of each of the tests by sampling
SIZES = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def tail_chance(texts, policy, prompt, length):
    """The chance that samples are as unlike the enumerated distribution as these or more: G against chi-squared."""
    probs = {(): 1.0}
    with torch.no_grad():
        for _ in range(length):
            p = policy(torch.tensor([[*prompt, *path] for path in probs])).logits[:, -1].double().softmax(-1)
            probs = {(*path, t): mass * float(row[t]) for (path, mass), row in zip(probs.items(), p, strict=True)
                     for t in range(len(row))}  # fmt: skip
    counts, cells, rare = Counter(texts), [], [0, 0.0]
    for text, chance in probs.items():
        expected = chance * len(texts)
        if expected >= 10:
            cells.append((counts[text], expected))
        else:
            rare = [rare[0] + counts[text], rare[1] + expected]
    cells += [tuple(rare)] if rare[1] else []
    g = 2 * sum(seen * math.log(seen / expected) for seen, expected in cells if seen)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(g / 2).double()))


def sampled_rollouts(seed):
    """Texts of a policy that has moved since its head was made, drafted by the head, and the policy."""
    policy = tiny_llama(**SIZES, num_key_value_heads=2, **NO_END, initializer_range=0.5)
    head = convert(policy, "eagle3", steps=2, taps=(0, 1, 2), draft_vocab_size=4).head
    policy.requires_grad_(True)
    move(policy, 0.1)
    rollouts = DraftedRollouts(head, every=None, draft="head", batch_size=1500)
    torch.manual_seed(seed)
    with rollouts.attached(policy):
        out = policy.generate(torch.tensor([[3, 1, 4]]).expand(1500, -1), do_sample=True, max_new_tokens=3, top_k=0)
    assert rollouts.figures()["rollout_tokens_per_step"] > 1.1
    return [tuple(row) for row in out[:, 3:].tolist()], policy


def test_sampled_rollouts_have_the_policys_distribution():
    texts, policy = sampled_rollouts(0)
    assert tail_chance(texts, policy, [3, 1, 4], 3) > FALSE_ALARM


def test_the_g_test_notices_texts_of_the_policy_before_it_moved():
    texts, policy = sampled_rollouts(0)
    move(policy, 0.1)
    assert tail_chance(texts, policy, [3, 1, 4], 3) < FALSE_ALARM


def test_other_calls_are_left_as_they_are_and_other_inputs_draft_too():
    policy, head = policy_and_head()
    batch = padded(ROWS)
    beams = policy.generate(**batch, num_beams=2, max_new_tokens=6)
    twice = policy.generate(**batch, **PLAIN, return_dict_in_generate=True)
    with DraftedRollouts(head, draft="head").attached(policy):
        assert torch.equal(policy.generate(**batch, num_beams=2, max_new_tokens=6), beams)
        out = policy.generate(**batch, **PLAIN, return_dict_in_generate=True)
        assert torch.equal(out.sequences, twice.sequences) and out.statistics()["accepted_length"] > 1
        policy.train()
        assert torch.equal(policy.generate(**batch, **PLAIN, draft="lookup"), twice.sequences)
        assert policy.training
        with DraftedRollouts(head).attached(policy) as rollouts, pytest.raises(ValueError, match="a policy already"):
            rollouts.attach(policy)


def test_what_cannot_draft_or_follow_is_refused_by_name(tmp_path):
    model = learnt("eagle3")
    with pytest.raises(TypeError, match=r"give its \.head"):
        DraftedRollouts(model)
    with pytest.raises(ValueError, match="max_tokens: the head stays as it is"):
        DraftedRollouts(model.head, every=None, max_tokens=100)
    joint = convert(tiny_llama(num_hidden_layers=2), "medusa", lora={"r": 2, "target_modules": ["q_proj"]})
    joint.save_pretrained(tmp_path)
    policy = tiny_llama(num_hidden_layers=2)
    before = {name for name, _ in policy.named_parameters()}
    with pytest.raises(UnsupportedModel, match="Medusa-2"):
        DraftedRollouts(tmp_path).attach(policy)
    assert before == {name for name, _ in policy.named_parameters()} and "generate" not in vars(policy)


def test_a_peft_policy_drafts_with_its_adapters():
    policy = with_adapter(num_hidden_layers=2)
    head = convert(tiny_llama(num_hidden_layers=2), "eagle3", steps=2, draft_vocab_size=97).head
    batch = padded(ROWS)
    expected = policy.generate(**batch, **PLAIN)
    rollouts = DraftedRollouts(head, draft="head", every=1)
    with rollouts.attached(policy):
        assert torch.equal(policy.generate(**batch, **PLAIN), expected)
        policy.train()
        rollouts.before_step()
        policy(**batch, labels=batch["input_ids"]).loss.backward()
        assert rollouts.after_backward() > 0


class _Samples(Trainer):
    """A trainer that generates before each step, as those of TRL do."""

    def training_step(self, model, inputs, *args, **kwargs):
        ids = model.generate(inputs["input_ids"][:, :3], do_sample=True, max_new_tokens=8, pad_token_id=0)
        return super().training_step(model, {"input_ids": ids, "labels": ids}, *args, **kwargs)


def trained(folder, steps, **options):
    """options: of the arguments. Returns the callback and the trainer."""
    policy, head = policy_and_head()
    rollouts = DraftedRollouts(copy.deepcopy(head), draft="head", every=2, learning_rate=1e-3)
    rows = [
        {"input_ids": torch.tensor(row), "labels": torch.tensor(row)}
        for row in torch.randint(3, 97, (8, 6), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    resume = options.pop("resume", None)
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to="none",
        learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = _Samples(policy, arguments, train_dataset=rows, callbacks=[rollouts])
    trainer.train(resume_from_checkpoint=resume)
    return rollouts, trainer


def test_a_trainers_rollouts_draft_and_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    torch.manual_seed(0)
    whole, trainer = trained(tmp_path / "whole", 4)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["rollout_tokens_per_step"] >= 1 and entry["rollout_seconds"] > 0 for entry in entries)
    assert ["head_loss" in entry for entry in entries] == [True, False, True, False]
    assert "generate" not in vars(trainer.model) and not trainer.model.model._forward_hooks
    torch.manual_seed(0)
    trained(tmp_path / "half", 2)
    resumed, _ = trained(tmp_path / "half", 4, resume=str(tmp_path / "half/checkpoint-2"))
    for name, tensor in whole.head.state_dict().items():
        assert torch.allclose(tensor, resumed.head.state_dict()[name], atol=1e-6), name
    loaded = specheads.load_head(trainer.model, tmp_path / "whole/head", dtype="auto").head
    assert all(tensor.equal(whole.head.state_dict()[name]) for name, tensor in loaded.state_dict().items())


# --- TRL ---


def test_grpo_in_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from tests.support.two_vocabularies import TARGET as TOKENIZER

    texts = {}
    for draft in ("head", False):
        policy = tiny_llama(num_hidden_layers=3, vocab_size=len(TOKENIZER))
        head = convert(policy, "eagle3", steps=2, draft_vocab_size=len(TOKENIZER)).head
        policy.requires_grad_(True)
        rollouts = DraftedRollouts(head, draft=draft, every=1)
        seen = texts[draft] = []

        def reward(completions, seen=seen, **kwargs):
            seen.append(completions)
            return [float(len(set(text))) for text in completions]

        arguments = trl.GRPOConfig(
            str(tmp_path / str(draft)), max_steps=3, per_device_train_batch_size=4, num_generations=4, logging_steps=1,
            max_completion_length=8, report_to="none", use_cpu=True, bf16=False, learning_rate=1e-3, disable_tqdm=True,
            gradient_checkpointing=True,
        )  # fmt: skip
        rows = datasets.Dataset.from_dict({"prompt": ["def f", "x = 1", "return", "a"]})
        trainer = trl.GRPOTrainer(
            policy, reward, args=arguments, train_dataset=rows, processing_class=TOKENIZER, callbacks=[rollouts]
        )
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(entries) == 3 and all(entry["rollout_tokens"] > 0 and entry["head_loss"] > 0 for entry in entries)
        assert rollouts.updater.updates == 3 and (tmp_path / str(draft) / "head/config.json").is_file()
    assert texts["head"] == texts[False]
