"""Tokens a step of a head in real greedy decoding, by domain. Greedy text is the base's own, so that two heads are
measured on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from specheads.decoding.results import AcceptanceCounts
from specheads.terminal import Report
from specheads.training.adapt.sessions import Prompt

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

BATCH = 8  # a step over so many texts takes a CPU little longer than over one
Measured = dict[str, dict[str, int]]  # by domain: prompts, tokens, steps


@torch.no_grad()
def measure(model: SpecModel, prompts: Sequence[Prompt], new_tokens: int, report: Report | None = None) -> Measured:
    """Decode the prompts with the head's own tree, BATCH at a time, and count tokens and steps after the prefill."""
    model.eval()
    config, measured = model.generation_config, Measured()
    # The base's config may have a penalty or a temperature.
    plain = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.generation_config = plain
    try:
        texts = model.generate_many(
            [prompt.ids for prompt in prompts], batch_size=BATCH, draft="head", max_new_tokens=new_tokens, stream=True
        )
        for done, text in enumerate(texts, start=1):
            prompt, gained = prompts[text.index], AcceptanceCounts.of(text.steps[1:])
            counts = measured.setdefault(prompt.domain, {"prompts": 0, "tokens": 0, "steps": 0})
            counts["prompts"] += 1
            counts["steps"] += gained.steps
            counts["tokens"] += gained.tokens
            if report:
                report(done / len(prompts), f"{done} of {len(prompts)} texts")
    finally:
        model.generation_config = config
    return measured


def accepted_length(counts: dict[str, int]) -> float:
    """Tokens a step; 1 where no step was needed."""
    return AcceptanceCounts(counts["steps"], counts["tokens"]).tokens_per_step


def together(measured: Measured, domains: Sequence[str]) -> float:
    """Tokens a step over these domains."""
    names = ("tokens", "steps")
    return accepted_length({name: sum(measured[domain][name] for domain in domains) for name in names})
