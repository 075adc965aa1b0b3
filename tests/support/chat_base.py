"""A tiny random base with a tokenizer of bytes and a chat template, on disk; and rows of chats."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import tiny_llama

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    return path


def save_base(folder, template=TEMPLATE, **config):
    """Some of its answers end by themselves, some do not. config: of its generation."""
    special = ["<|end|>", "<|pad|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token=special[0], eos_token=special[0], pad_token=special[1]
    )
    tokenizer.chat_template = template
    ends = [0, *range(40, 60)]  # a random model seldom writes one certain token
    tiny = tiny_llama(vocab_size=len(vocab), num_hidden_layers=3, eos_token_id=ends, bos_token_id=0, pad_token_id=1)
    for name, value in config.items():
        setattr(tiny.generation_config, name, value)
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
