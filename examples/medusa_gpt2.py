"""Train a Medusa head for GPT-2 (or any model of its size) on a text file of yours, save it and decode with it.

python examples/medusa_gpt2.py FILE.txt [MODEL] [FOLDER]      # some minutes on a CPU for 100 kB of text
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specheads

FILE = sys.argv[1]
MODEL = sys.argv[2] if len(sys.argv) > 2 else "openai-community/gpt2"
FOLDER = sys.argv[3] if len(sys.argv) > 3 else "runs/gpt2-medusa"
LENGTH = 64  # tokens of a row

base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
ids = tokenizer(Path(FILE).read_text("utf8"), return_tensors="pt", verbose=False)["input_ids"][0]
prompts = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[:512, : LENGTH // 2]
assert len(prompts) >= 8, f"{FILE} has {len(ids)} tokens; give a text of {8 * LENGTH} or more"

# A head learns the model's own continuations: those are what it will be asked to guess.
options = {"do_sample": False, "max_new_tokens": LENGTH // 2, "min_new_tokens": LENGTH // 2, "pad_token_id": 0}
rows = torch.cat([base.generate(part, attention_mask=torch.ones_like(part), **options) for part in prompts.split(16)])
kept, trained = rows[:4], rows[4:]

# Four heads; each predicts one token more from the last hidden state. The drafts form a small tree of their choices.
model = specheads.convert(base, "medusa", num_heads=4)
arguments = specheads.SpecTrainingArguments(
    FOLDER,
    num_train_epochs=4,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=10,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
dataset = [{"input_ids": row, "labels": row} for row in trained]
trainer = specheads.SpecTrainer(model, arguments, train_dataset=dataset)
trainer.train()
trainer.save_model()  # the head alone, and its card

restored = specheads.SpecModel.from_pretrained(FOLDER, base=base)
greedy = {"do_sample": False, "max_new_tokens": LENGTH // 2, "pad_token_id": 0}
inputs = {"input_ids": kept[:, : LENGTH // 2], "attention_mask": torch.ones_like(kept[:, : LENGTH // 2])}
out = restored.generate(**inputs, **greedy, draft="head", return_dict_in_generate=True)
assert torch.equal(out.sequences, base.generate(**inputs, **greedy)), "in float32 the text is the model's own"
print(f"{out.statistics()['accepted_length']:.2f} tokens a step on rows that it was not trained on")
