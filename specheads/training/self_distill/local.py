"""Answers by the base itself, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specheads.data.rows import Row, truncate
from specheads.decoding.prompt_batches import batches, new_tokens
from specheads.hub import options as hub_options
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask


def load(options: Options) -> Any:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype, **hub_options(options.base))
    return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_room(config: Any, options: Options) -> int:
    """Tokens that a prompt may have beside its answer."""
    room = min(options.max_length, getattr(config, "max_position_embeddings", None) or options.max_length)
    if room <= options.max_new_tokens:
        raise ValueError(f"--max_new_tokens {options.max_new_tokens}: the base takes {room} tokens, prompt included")
    return room - options.max_new_tokens


def cut_prompt(ids: list[int], room: int, tokenizer: Any) -> list[int]:
    """The end of a prompt that is too long."""
    return truncate({"input_ids": ids, "labels": ids}, room, tokenizer)["input_ids"]


def answer(base: Any, tokenizer: Any, asked: Sequence[Ask], options: Options) -> list[list[Row]]:
    """The base's answers to each question, turn by turn; questions of one temperature are answered together."""
    rows: list[list[Row]] = [[] for _ in asked]
    for temperature in dict.fromkeys(one.temperature for one in asked):
        places = [i for i, one in enumerate(asked) if one.temperature == temperature]
        for start in range(0, len(places), options.batch_size):
            batch = places[start : start + options.batch_size]
            for i, made in zip(batch, _answer(base, tokenizer, [asked[i] for i in batch], options), strict=True):
                rows[i] = made
    return rows


@torch.no_grad()
def _answer(base: Any, tokenizer: Any, asked: Sequence[Ask], options: Options) -> list[list[Row]]:
    room = prompt_room(base.config, options)
    sampling = options.sampling(asked[0].temperature)
    pad = tokenizer.pad_token_id or 0  # fills the rows that have ended, and is cut away
    rows: list[list[Row]] = [[] for _ in asked]
    answers: list[list[str]] = [[] for _ in asked]
    for turn in range(max(one.num_turns for one in asked)):
        live = [i for i, one in enumerate(asked) if turn < one.num_turns]
        prompts = [cut_prompt(asked[i].question.prompt(answers[i], tokenizer), room, tokenizer) for i in live]
        (inputs,) = batches(tokenizer, prompts, base.device, size=len(live))
        made = base.generate(
            **inputs, max_new_tokens=options.max_new_tokens, pad_token_id=pad, do_sample=bool(sampling), **sampling
        )
        for i, prompt, new in zip(live, prompts, new_tokens(base, inputs, made), strict=True):
            rows[i].append(asked[i].row(prompt, new))
            answers[i].append(tokenizer.decode(new, skip_special_tokens=True))
    return rows
