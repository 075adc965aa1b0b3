"""What ModelOpt's scripts have: modes, rows, a collator and a transformers Trainer of a tiny base."""

import torch
from transformers import Trainer, TrainingArguments

from tests.support.tiny_models import tiny_llama

IDS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(0))
PROMPT = IDS[:1, :6]
MEDUSA = [("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1})]
SIZES = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EAGLE = [("eagle", {"eagle_architecture_config": SIZES})]


def small(**options):
    return tiny_llama(num_hidden_layers=3, **options)


def greedy(model, **options):
    return model.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)


def modelopts(ids, answer_from=4):
    """A row as ModelOpt's examples make it: labels and loss_mask about the next token, 0 where a collator pads."""
    labels, loss_mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    labels[answer_from - 1 : -1], loss_mask[answer_from - 1 : -1] = ids[answer_from:], 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "loss_mask": loss_mask}


def padded(rows):
    """As their DataCollatorWithPadding does, labels included."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values):
        return torch.cat([values, torch.zeros(longest - len(values), dtype=values.dtype)])

    return {name: torch.stack([pad(row[name]) for row in rows]) for name in rows[0]}


ROWS = [modelopts(row[:length]) for row, length in zip(IDS.repeat(2, 1), (14, 9, 12, 14), strict=True)]


def trainer_of(model, folder, **options):
    arguments = TrainingArguments(
        str(folder), **{"max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **options},
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:3], data_collator=padded)
