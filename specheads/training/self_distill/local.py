"""Answers by the base itself, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specheads.data.rows import Row, truncate
from specheads.decoding.generation.prompt_batches import batches, new_tokens
from specheads.hub import options as hub_options
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask


def load(options: Options) -> Any:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype, **hub_options(options.base))
    return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_room(config: Any, options: Options) -> int:
    """Tokens that a prompt may have, with room for its answer."""
    room = min(options.max_length, getattr(config, "max_position_embeddings", None) or options.max_length)
    if room <= options.max_new_tokens:
        raise ValueError(f"--max_new_tokens {options.max_new_tokens}: the base takes {room} tokens, prompt included")
    return room - options.max_new_tokens


def cut_prompt(ids: list[int], room: int, tokenizer: Any) -> list[int]:
    """The end of a prompt that is too long."""
    return truncate({"input_ids": ids, "labels": ids}, room, tokenizer)["input_ids"]


def answer(base: Any, tokenizer: Any, asks: Sequence[Ask], options: Options) -> list[list[Row]]:
    """The base's answers to each question, turn by turn; questions of one temperature are answered together."""
    rows: list[list[Row]] = [[] for _ in asks]
    for temperature in dict.fromkeys(ask.temperature for ask in asks):
        indices = [i for i, ask in enumerate(asks) if ask.temperature == temperature]
        for start in range(0, len(indices), options.batch_size):
            batch = indices[start : start + options.batch_size]
            answered = _answer_batch(base, tokenizer, [asks[i] for i in batch], options)
            for i, turns in zip(batch, answered, strict=True):
                rows[i] = turns
    return rows


@torch.no_grad()
def _answer_batch(base: Any, tokenizer: Any, asks: Sequence[Ask], options: Options) -> list[list[Row]]:
    room = prompt_room(base.config, options)
    sampling = options.sampling(asks[0].temperature)
    pad = tokenizer.pad_token_id or 0  # fills the rows that have ended; new_tokens cuts it off
    rows: list[list[Row]] = [[] for _ in asks]
    answers: list[list[str]] = [[] for _ in asks]
    for turn in range(max(ask.num_turns for ask in asks)):
        live = [i for i, ask in enumerate(asks) if turn < ask.num_turns]
        prompts = [cut_prompt(asks[i].question.prompt(answers[i], tokenizer), room, tokenizer) for i in live]
        (inputs,) = batches(tokenizer, prompts, base.device, size=len(live))
        output = base.generate(
            **inputs, max_new_tokens=options.max_new_tokens, pad_token_id=pad, do_sample=bool(sampling), **sampling
        )
        for i, prompt, new in zip(live, prompts, new_tokens(base, inputs, output), strict=True):
            rows[i].append(asks[i].row(prompt, new))
            answers[i].append(tokenizer.decode(new, skip_special_tokens=True))
    return rows
