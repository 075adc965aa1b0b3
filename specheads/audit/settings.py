"""What a server is asked for: how each token is chosen and where a text ends, as transformers' own processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.processors import is_prefix_free
from specheads.decoding.probs.shortlist import warp
from specheads.options import OptionError


@dataclass(frozen=True)
class Settings:
    """One way to ask for text. Neutral values change nothing, and are sent all the same.

    temperature: 0 is greedy; top_k: 0 keeps all; max_tokens: of a text; eos: ids that end a text, part of its tokens;
    stop: strings that end it, so that a text may be shorter than max_tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (type(self.top_k) is int and self.top_k >= 0, "a whole number, 0 for none"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (0 <= self.min_p < 1, "0 to below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "max_tokens": (type(self.max_tokens) is int and self.max_tokens >= 1, "a whole number of at least 1"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise OptionError(f"{{{name}}}: expected {expected}", **{name: getattr(self, name)})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __str__(self) -> str:
        """Only what is not neutral: "temperature 0.7, top-p 0.9"."""
        parts = ["greedy" if self.greedy else f"temperature {self.temperature:g}"]
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                parts.append(f"{name.replace('_', '-')} {getattr(self, name):g}")
        return ", ".join(parts)

    def processors(self) -> LogitsProcessorList:
        """transformers' processors in its order: penalty, temperature, top-k, top-p, min-p."""
        chosen = LogitsProcessorList()
        if self.repetition_penalty != 1:
            chosen.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.greedy:
            return chosen
        if self.temperature != 1:
            chosen.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chosen.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chosen.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p:
            chosen.append(hf.MinPLogitsWarper(self.min_p))
        return chosen

    def generate_options(self) -> dict[str, Any]:
        """The same as arguments of `generate()`."""
        options: dict[str, Any] = {
            "do_sample": not self.greedy, "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_tokens, "eos_token_id": sorted(self.eos) or None,
        }  # fmt: skip
        if not self.greedy:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            options["min_p"] = self.min_p or None
        return options


def process(logits: Tensor, prompt: list[int], tokens: list[int], settings: Settings) -> Tensor:
    """The base's logits (n, V) before each of n tokens → processed scores (n, V), each after its own prefix."""
    processors = settings.processors()
    if all(map(is_prefix_free, processors)):
        return warp(processors, logits)
    scores, text = at_least_float32(logits).clone(), torch.tensor([[*prompt, *tokens]], device=logits.device)
    for i in range(len(scores)):
        ids: Any = text[:, : len(prompt) + i]
        scores[i] = processors(ids, scores[i : i + 1].clone())[0]
    return scores
