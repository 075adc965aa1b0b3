"""What a server is asked for: how each token is chosen and where a text ends, as transformers' own processors."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.processors import is_prefix_free
from specheads.decoding.probs.shortlist import warp
from specheads.options import OptionError, refuse_unknown


@dataclass(frozen=True)
class Settings:
    """One way to ask for text. Neutral values change nothing, and are sent all the same.

    temperature: 0 is greedy; top_k: 0 keeps all; presence_penalty, frequency_penalty: taken from the logits of tokens
    in the text, once and for each time; count_prompt: in the prompt too, as llama.cpp does; max_tokens: of a text; eos:
    ids that end a text, part of its tokens; stop: strings that end it, so that a text may be shorter than max_tokens;
    logprobs: those of the tokens are asked for too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    count_prompt: bool = False
    max_tokens: int = 64
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (type(self.top_k) is int and self.top_k >= 0, "a whole number, 0 for none"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (0 <= self.min_p < 1, "0 to below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "stop": (all(self.stop), "strings that are not empty"),
            "max_tokens": (type(self.max_tokens) is int and self.max_tokens >= 1, "a whole number of at least 1"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise OptionError(f"{{{name}}}: expected {expected}", **{name: getattr(self, name)})

    @classmethod
    def read(cls, text: str, **given: Any) -> Settings:
        """Of pairs such as "temperature=0.7 top_p=0.9 stop='a b'", quoted as in a shell; each stop string is a pair.

        given: what the text does not say. OptionError for a name or value that is none of Settings'.
        """
        kinds = {f.name: type(getattr(cls, f.name)) for f in fields(cls) if f.name != "eos"}
        values: dict[str, Any] = dict(given)
        for name, equals, value in (word.partition("=") for word in shlex.split(text)):
            refuse_unknown([name], kinds, what="setting of --ask")
            try:
                if kinds[name] is tuple:
                    values[name] = (*values.get(name, ()), value)
                elif kinds[name] is bool:
                    values[name] = {"true": True, "false": False}[value.lower()] if equals else True
                else:
                    values[name] = kinds[name](value)
            except (ValueError, KeyError):
                raise OptionError(f"{{ask}}: {name} is no {kinds[name].__name__}", ask=text) from None
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Does a token's score depend on the tokens before it by more than the model?"""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __str__(self) -> str:
        """Only what is not neutral: "temperature 0.7, top-p 0.9"."""
        parts = ["greedy" if self.greedy else f"temperature {self.temperature:g}"]
        neutral = {
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }  # fmt: skip
        for name, value in neutral.items():
            if getattr(self, name) != value:
                parts.append(f"{name.replace('_', '-')} {getattr(self, name):g}")
        return ", ".join([*parts, *([f"stop at {', '.join(map(repr, self.stop))}"] if self.stop else [])])

    def processors(self, start: int = 0) -> LogitsProcessorList:
        """transformers' processors in its order: penalties, temperature, top-k, top-p, min-p. start: the index at which
        the text begins."""
        chosen = LogitsProcessorList()
        if self.repetition_penalty != 1:
            chosen.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            counted_from = 0 if self.count_prompt else start
            chosen.append(CountPenalties(self.presence_penalty, self.frequency_penalty, counted_from))
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
        """The same as arguments of `generate()`. ValueError for penalties that it does not have."""
        if self.presence_penalty or self.frequency_penalty:
            raise ValueError(f"{self}: generate() has no presence or frequency penalty")
        options: dict[str, Any] = {
            "do_sample": not self.greedy, "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_tokens, "eos_token_id": sorted(self.eos) or None,
        }  # fmt: skip
        if not self.greedy:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            options["min_p"] = self.min_p or None
        return options


class CountPenalties(hf.LogitsProcessor):
    """scores - presence * [count > 0] - frequency * count, where count is how often a token stands among the ids from
    `start` on: OpenAI's definition, and that of vLLM, SGLang and OpenVINO GenAI."""

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        ids = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


def process(logits: Tensor, prompt: list[int], tokens: list[int], settings: Settings, written: int = 0) -> Tensor:
    """The base's logits (n, V) before each of n tokens → processed scores (n, V), each after its own prefix.

    written: so many of the prompt's last ids are of the text already."""
    processors = settings.processors(len(prompt) - written)
    if all(map(is_prefix_free, processors)):
        return warp(processors, logits)
    scores, text = at_least_float32(logits).clone(), torch.tensor([[*prompt, *tokens]], device=logits.device)
    for i in range(len(scores)):
        ids: Any = text[:, : len(prompt) + i]
        scores[i] = processors(ids, scores[i : i + 1].clone())[0]
    return scores
