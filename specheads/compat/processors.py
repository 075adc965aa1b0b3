"""romsto's logits processors: filter first, then apply the temperature, then sample.

Hugging Face's generate() options apply the temperature first, which gives a different nucleus. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specheads.options import require_number, require_whole


class LogitsProcessor(ABC):
    """`processor(logits)` returns probs, `processor.sample(probs)` a token.

    A subclass defines `_process(logits)`, which must treat each row of logits independently, and inherits `sample` from
    `GreedyProcessor` or `MultinomialProcessor` or defines its own. With its own `sample`, a draft is accepted if it
    equals the token drawn. generate() also accepts a processor as logits_processor=.
    """

    # Read by specheads.decoding.probs.processors. Subclasses are checked for state kept between calls.
    ignores_ids = True
    depends_on_prefix_only = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__ and "depends_on_prefix_only" not in vars(cls):
            cls.depends_on_prefix_only = False

    def __init__(self, temperature: float) -> None:
        self.temperature = number("temperature", temperature, above=0)

    @abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """Logits (…, V) → filtered logits (…, V), before the temperature. May change its argument in place."""

    @abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """Probs (…, V) → tokens (…, 1). Drawing tokens takes at most two dimensions."""

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> Tensor:
        """Logits (…, V) → probs (…, V). Called with ids and scores (R, V), as Hugging Face does: processed scores."""
        if scores is None:
            return self._scores(logits).softmax(-1)
        if self.draws_its_own:
            token = self.sample(self._scores(scores).softmax(-1))
            return torch.full_like(scores, -torch.inf).scatter_(-1, token.to(scores.device), 0.0)
        return self._scores(scores)

    def _scores(self, logits: Tensor) -> Tensor:
        return self._process(logits.clone()) / self.temperature

    @property
    def draws_its_own(self) -> bool:
        """Does `sample` do something else than take the likeliest token or draw from the probs?"""
        return type(self).sample not in (GreedyProcessor.sample, MultinomialProcessor.sample)

    @property
    def do_sample(self) -> bool:
        """Does generate() sample from this processor's scores, or take the likeliest token?"""
        return type(self).sample is MultinomialProcessor.sample

    def __iter__(self) -> Iterator[LogitsProcessor]:
        """Yields the processor itself, since Hugging Face expects a list."""
        yield self

    def __len__(self) -> int:
        return 1


class GreedyProcessor(LogitsProcessor):
    """The likeliest token, whatever the temperature."""

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        return probs.argmax(-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """Sampling from all tokens."""

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        return torch.multinomial(probs, 1)


class TopKProcessor(MultinomialProcessor):
    """Sampling from the top_k likeliest tokens and any tied with the last of them."""

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        self.top_k = whole("top_k", top_k)

    def _process(self, logits: Tensor) -> Tensor:
        return top_k_of(logits, self.top_k)


class NucleusProcessor(MultinomialProcessor):
    """Sampling from the fewest tokens that have more than top_p of the probability at temperature 1."""

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        self.top_p = number("top_p", top_p, most=1)

    def _process(self, logits: Tensor) -> Tensor:
        return nucleus_of(logits, self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """Sampling from the nucleus of the renormalised top_k likeliest tokens."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        self.top_k, self.top_p = whole("top_k", top_k), number("top_p", top_p, most=1)

    def _process(self, logits: Tensor) -> Tensor:
        return nucleus_of(top_k_of(logits, self.top_k), self.top_p)


def top_k_of(logits: Tensor, k: int) -> Tensor:
    """logits (…, V) with −∞ below the k-th largest."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def nucleus_of(logits: Tensor, p: float) -> Tensor:
    """logits (…, V) with −∞ at tokens where the likelier ones already have more than p of the probability."""
    ordered, tokens = logits.sort(dim=-1, descending=True)
    likelier = functional.pad(ordered.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
    return logits.masked_fill((likelier > p).scatter(-1, tokens, likelier > p), -torch.inf)


def number(name: str, value: Any, *, above: float = -math.inf, most: float = math.inf) -> float:
    """The value, if it is a finite number in range and at least 0. TypeError or ValueError otherwise."""
    require_number(name, value)
    if not (above < value <= most and 0 <= value < math.inf):
        raise ValueError(f"{name}={value} must be " + (f"above {above}" if most == math.inf else f"0 to {most}"))
    return value


def whole(name: str, value: Any) -> int:
    """The value as an int, if it is a whole number of at least 1. TypeError or ValueError otherwise."""
    require_whole(name, value)
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return int(value)
