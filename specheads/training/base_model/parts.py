"""Tokenizer, model, teacher and optimizers for training a base model."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specheads.training.base_model.options import Options
from specheads.training.trainer.optim import Muon

LAYERS, POSITIONS = 8, 1024  # of a new Llama; more positions if it is trained on longer texts
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|endoftext|>{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(byte_fallback=False))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    end, user, assistant, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=end,
        eos_token=end,
        pad_token=pad,
        extra_special_tokens=[user, assistant],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """One stream of ids, an <|endoftext|> before each file. ValueError for a tokenizer without such a token."""
    ids: list[int] = []
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has neither bos nor eos to put before a file: give it one"
        )
    for row in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += [start, *row]
    return np.array(ids, dtype=np.int64)


def with_layers(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The model with `layers` layers. More: copies with zeroed output projections are inserted evenly, so it computes
    the same function. Fewer: an evenly spaced subset that includes the first and last."""
    old = model.config.num_hidden_layers
    if layers < old:
        kept = [round(i * (old - 1) / max(1, layers - 1)) for i in range(layers)]
        stack = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    else:
        new = layers - old
        after = [math.ceil((i + 1) * old / new) - 1 for i in range(new)]
        stack = torch.nn.ModuleList()
        for i, layer in enumerate(model.model.layers):
            stack.append(layer)
            for _ in range(after.count(i)):
                added = copy.deepcopy(layer)
                torch.nn.init.zeros_(added.self_attn.o_proj.weight)
                torch.nn.init.zeros_(added.mlp.down_proj.weight)
                stack.append(added)
    for i, layer in enumerate(stack):
        layer.self_attn.layer_idx = i  # type: ignore[union-attr]
    model.model.layers = stack
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0]] * layers
    return model


def load_teacher(path: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model to learn from. ValueError if its vocabulary differs."""
    vocabulary: dict[str, int] = PreTrainedTokenizerFast.from_pretrained(path).get_vocab()
    if vocabulary != tokenizer.get_vocab():
        raise ValueError(f"--teacher {path} has another tokenizer; start from it or from a model of its: --init {path}")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def build_model(options: Options, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model of --init with the requested number of layers, or a new one: from --config, or a Llama. ValueError if
    its longest text is shorter than those it would be trained on."""
    if options.init:
        model = AutoModelForCausalLM.from_pretrained(options.init, dtype=torch.float32)
        _refuse_longer_texts(options, options.init, model.config)
        if options.layers in (None, model.config.num_hidden_layers):
            return model
        if not isinstance(model, LlamaForCausalLM):
            raise ValueError(
                f"--layers {options.layers}: {options.init} is a {type(model).__name__} of "
                f"{model.config.num_hidden_layers} layers, and only a Llama takes another number"
            )
        return with_layers(model, options.layers)
    if options.config:
        config = AutoConfig.from_pretrained(options.config, vocab_size=len(tokenizer))
        _refuse_longer_texts(options, options.config, config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config = LlamaConfig(
        hidden_size=options.hidden_size, num_hidden_layers=options.layers or LAYERS, head_dim=options.head_dim,
        intermediate_size=options.intermediate_size, num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads, vocab_size=len(tokenizer),
        max_position_embeddings=max(POSITIONS, options.sequence_length), tie_word_embeddings=True, rms_norm_eps=1e-5,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _refuse_longer_texts(options: Options, origin: str, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and options.sequence_length > most:
        raise ValueError(
            f"--sequence_length {options.sequence_length}: {origin} takes texts of {most} tokens; give at most that"
        )


def build_optimizers(model: PreTrainedModel, options: Options) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices, AdamW for embeddings and norms, each with its peak learning rate."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, lr=options.muon_lr, weight_decay=0.01, like_adamw=False)
    adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, options.muon_lr), (adam, options.adam_lr)]
