"""Train an EAGLE-3 head for the small shipped base, save it, and time it beside transformers' generate().

python examples/train_eagle3.py      # from a clone; four minutes on one core
"""

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specheads
from specheads.bench.prompts import held_out_prompts
from specheads.data.corpus import checkpoints_dir, texts

folder = checkpoints_dir() / "base"  # a small model of Python source that comes with the repository
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
source = "".join([text for _, text in texts("train")][::12])[:1_200_000]
ids = tokenizer(source, return_tensors="pt", verbose=False)["input_ids"][0]
rows = ids[: len(ids) // 128 * 128].view(-1, 128)[torch.randperm(len(ids) // 128)]
greedy = {"do_sample": False, "max_new_tokens": 96, "min_new_tokens": 96}  # 256 rows in the base's own words
own = [base.generate(part, attention_mask=torch.ones_like(part), **greedy) for part in rows[:256, :32].split(32)]
rows = torch.cat([torch.cat(own).repeat(4, 1)[:1000], rows[256:1256]])

model = specheads.convert(base, "eagle3", steps=3, draft_vocab_size=1024, tree="chain:4")
model.head.set_draft_vocabulary(rows.flatten().bincount(minlength=base.config.vocab_size), base)
arguments = specheads.SpecTrainingArguments(
    "runs/first",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    learning_rate=4e-3,
    warmup_steps=10,
    muon=True,
    head_lr_groups={"lm_head": 0.25},
    adam_beta2=0.95,
    logging_steps=25,
    save_strategy="no",
    report_to="none",
)
trainer = specheads.SpecTrainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
trainer.save_model()  # the head and its card; SpecModel.from_pretrained("runs/first") restores it

seconds = {base: 0.0, model.eval(): 0.0}
for prompt in held_out_prompts(tokenizer, 8):  # of files that neither the base nor the head has seen
    for decoder in seconds:
        began = time.perf_counter()
        decoder.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64, do_sample=False)
        seconds[decoder] += time.perf_counter() - began
print(f"{seconds[base] / seconds[model]:.2f} times the speed of transformers' generate()")
