"""Answers by the base itself, on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from specheads.data.rows import Row, truncate
from specheads.decoding.generation.many import generate_many
from specheads.hub import hub_options
from specheads.models.base.loading import load_language_model
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask


def load(options: Options) -> Any:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    base: Any = load_language_model(options.base, dtype=dtype, **hub_options(options.base))
    return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_room(config: Any, options: Options) -> int:
    """The most tokens that a prompt may have, leaving room for its answer."""
    room = min(options.max_length, getattr(config, "max_position_embeddings", None) or options.max_length)
    if room <= options.max_new_tokens:
        raise ValueError(f"--max_new_tokens {options.max_new_tokens}: the base takes {room} tokens, prompt included")
    return room - options.max_new_tokens


def cut_prompt(ids: list[int], room: int, tokenizer: Any) -> list[int]:
    """The end of a prompt that is too long."""
    return truncate({"input_ids": ids, "labels": ids}, room, tokenizer)["input_ids"]


@torch.no_grad()
def answer(base: Any, tokenizer: Any, asks: Sequence[Ask], options: Options, first: int) -> list[list[Row]]:
    """The base's answers to each question, turn by turn; questions of one temperature are batched.

    first: the number of the first answer among all. Each is sampled with a seed derived from its number, so that it
    depends neither on its batch nor on where the run was resumed."""
    room, pad = prompt_room(base.config, options), tokenizer.pad_token_id or 0
    rows: list[list[Row]] = [[] for _ in asks]
    answers: list[list[str]] = [[] for _ in asks]
    numbers = list(accumulate((ask.num_turns for ask in asks), initial=first))
    for temperature in dict.fromkeys(ask.temperature for ask in asks):
        sampling: dict[str, Any] = {**options.sampling(temperature)}
        indices = [i for i, ask in enumerate(asks) if ask.temperature == temperature]
        for turn in range(max(asks[i].num_turns for i in indices)):
            live = [i for i in indices if turn < asks[i].num_turns]
            prompts = [cut_prompt(asks[i].question.prompt(answers[i], tokenizer), room, tokenizer) for i in live]
            seeds = [random.Random(f"{options.seed} {numbers[i] + turn}").getrandbits(62) for i in live]
            results = generate_many(
                base, prompts, batch_size=options.batch_size, max_new_tokens=options.max_new_tokens, pad_token_id=pad,
                do_sample=bool(sampling), seed=seeds if sampling else None, **sampling,
            )  # fmt: skip
            for i, result in zip(live, results, strict=True):
                rows[i].append(asks[i].row(result.prompt, result.tokens))
                answers[i].append(tokenizer.decode(result.tokens, skip_special_tokens=True))
    return rows
