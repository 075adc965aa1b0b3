"""A tiny T5 that is taught multiple choice and sums in seconds, in CS Drafting's prompts; and rows of both kinds."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from specheads.bench.compare.tasks import gsm8k, mmlu

ORDINALS = ["first", "second", "third", "last"]
WORDS = ["apple", "stone", "chair", "cloud", "train", "glass", "river"]


def choice(rng):
    """A row in the columns of CS Drafting's files."""
    index = rng.randrange(4)
    words = dict(zip("ABCD", rng.sample(WORDS, 4), strict=True))
    return {"input": f"Which of these words comes {ORDINALS[index]} ?", **words, "target": "ABCD"[index]}


def total(rng):
    a, b = rng.randint(1, 3), rng.randint(1, 3)
    return {"question": f"Tom has {a} and gets {b} so", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}


def answered(row):
    """Prompt and worked answer."""
    if "target" in row:
        return mmlu(row).prompt, f"It comes {row['input'].split()[-2]} so the answer is ({row['target']})"
    return gsm8k(row).prompt, f"In all The answer is {gsm8k(row).answer}"


def tokenizer_for(texts):
    words = ["<pad>", "</s>", "<unk>", *sorted({word for text in texts for word in text.split()})]
    of_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    of_words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )


def teach(folder, steps=120, early=40, size=16):
    """Train, and save as folder/large, with itself after `early` steps as folder/small; rows of MMLU's and GSM8K's
    kind drawn apart from those it learnt."""
    torch.manual_seed(0)
    rng = random.Random(0)
    shown = [make(rng) for _ in range(size * 20) for make in (choice, total)]
    pairs = [answered(row) for row in shown]
    tokenizer = tokenizer_for([text for pair in pairs for text in pair])
    config = T5Config(
        vocab_size=len(tokenizer), d_model=48, d_kv=16, d_ff=96, num_layers=2, num_heads=3, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        taken = rng.sample(pairs, size)
        given = tokenizer([prompt for prompt, _ in taken], return_tensors="pt", padding=True)
        labels = tokenizer([answer for _, answer in taken], return_tensors="pt", padding=True).input_ids
        labels[labels == 0] = -100
        loss = model(input_ids=given.input_ids, attention_mask=given.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 in (early, steps):
            path = folder / ("large" if step + 1 == steps else "small")
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
    return loss.item(), [choice(rng) for _ in range(12)], [total(rng) for _ in range(12)]
