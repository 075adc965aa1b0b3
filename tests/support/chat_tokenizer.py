"""A small tokenizer with chat templates of several kinds, a conversation, and which of its text a row supervises."""

from __future__ import annotations

import re

import tokenizers
import transformers

from specheads.data.config import DataConfig
from specheads.data.datasets import IGNORED

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like Qwen3: what precedes a turn's answer depends on whether another turn follows
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' and loop.last %}(think) {% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIALS = ["<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "very well"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "still well"},
]
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", MARKED)


def build_tokenizer(template: str = MARKED, trim_offsets: bool = False):
    """A byte-level BPE of 400 tokens; trim_offsets=True is how GPT-2 and Llama 3 report offsets."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([m["content"] for m in CHAT] * 3 + ["a plain text, and another one\n\n"] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=SPECIALS[3:],
        chat_template=template,
    )


def config(**options) -> DataConfig:
    return DataConfig(**{"train": "unused", **options})


def supervised(row, tokenizer) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = [[]]
    for label, token in zip(row["labels"], row["input_ids"], strict=True):
        assert label in (IGNORED, token), "a label is its own token or ignored"
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]
