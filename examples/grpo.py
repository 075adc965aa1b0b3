"""GRPO in TRL with rollouts that draft and a head that follows the policy: the small shipped base learns to comment.

pip install trl; python examples/grpo.py [steps]      # from a clone; some ten seconds a step on one core
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from specheads.bench.prompts import held_out_prompts
from specheads.compat.rollouts import DraftedRollouts
from specheads.data.corpus import checkpoints_dir

folder = checkpoints_dir()
policy = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder / "base")


def comments(completions, **kwargs):
    """The share of lines with a comment."""
    return [sum("#" in line for line in text.splitlines()) / (1 + text.count("\n")) for text in completions]


# every=2: the head takes a step at every second step of the policy; "head": always draft ("auto": where it pays).
rollouts = DraftedRollouts(folder / "eagle3", every=2, draft="head")
arguments = GRPOConfig(
    "runs/grpo",
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=48,
    temperature=0.7,
    learning_rate=2e-4,
    bf16=False,
    logging_steps=1,
    report_to="none",
)
trainer = GRPOTrainer(
    policy,
    comments,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": held_out_prompts(tokenizer, 16)}),
    processing_class=tokenizer,
    callbacks=[rollouts],
)
trainer.train()
trainer.save_model()  # the policy; its head is in runs/grpo/head
for entry in trainer.state.log_history:
    if "reward" in entry:
        print(
            f"step {entry['step']}: reward {entry['reward']:.2f}, {entry['rollout_tokens_per_step']:.2f} tokens a step"
        )
