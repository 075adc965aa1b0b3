"""What an audit asks of a server, and a server in this process: a model's own generate(), ours or transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from specheads.audit.settings import Settings
from specheads.decoding.generation.outputs import SpecGenerateOutput
from specheads.decoding.results import AcceptanceCounts


class Place(StrEnum):
    """Of a token among the passes of its server. It is known before the token is drawn, so a right server's tokens of a
    place follow the model as all others do. Whether a token was accepted is not: accepted and rejected drafts, each
    alone, follow other distributions."""

    AFTER_REJECTION = "the first of a pass after a rejection"
    AFTER_DRAFT = "drawn after a draft was accepted whole"


@dataclass(frozen=True)
class Answer:
    """tokens: with the EOS where it ended the text; none where only a text is known that does not tell them.

    What else a server may say of it: text: as it decodes the tokens; logprobs: of each token; drafted, accepted: how
    many tokens its draft proposed, and how many of them it took; by_depth: in how many passes it took at least 1, 2, …;
    places: of each token, None for all others."""

    tokens: list[int]
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    drafted: int | None = None
    accepted: int | None = None
    by_depth: tuple[int, ...] = ()
    places: tuple[Place | None, ...] | None = None


def places_of(gained: Sequence[int], drafted: Sequence[int]) -> tuple[Place | None, ...]:
    """gained: tokens that each pass gave, the one over the prompt first; drafted: the tokens that it verified. Of a
    tree, which may be accepted to its end and still have other tokens, the pass counts as one with a rejection."""
    places: list[Place | None] = []
    rejected = False
    for gain, drafts in zip(gained, drafted, strict=True):
        whole = 0 < drafts < gain
        places += [None] * gain
        if rejected and gain:
            places[-gain] = Place.AFTER_REJECTION
        if whole:
            places[-1] = Place.AFTER_DRAFT
        rejected = drafts > 0 and not whole
    return tuple(places)


class Client(Protocol):
    """name: of the server, for the report."""

    name: str

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[Answer]:
        """What the server writes after each prompt. Prompts of one call are asked for together, so that the server
        batches them."""
        ...


class CountingClient(Client, Protocol):
    """A server that may say what it drafted, in its answers or in counters."""

    def counters(self) -> AcceptanceCounts | None:
        """Of everything since its start, if it counts."""
        ...


class InProcess:
    """model: a SpecModel or a transformers model; options: further arguments of its generate(), such as draft="head".
    Draws from torch's global generator."""

    def __init__(self, model: Any, name: str = "generate()", **options: Any) -> None:
        if "seed" in options:
            raise ValueError("a seed would repeat the same text in each request; call torch.manual_seed() instead")
        self.model, self.name, self.options = model, name, options

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[Answer]:
        """One call of generate(), padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {**settings.generate_options(), "pad_token_id": 0, **self.options}
        out = self.model.generate(ids, attention_mask=mask.to(ids.device), return_dict_in_generate=True, **options)
        rows = [until_end(row, settings) for row in out.sequences[:, width:].tolist()]
        if not isinstance(out, SpecGenerateOutput) or not out.steps:
            return [Answer(row) for row in rows]
        answers = []
        for b, row in enumerate(rows):
            places = places_of([len(step.tokens[b]) for step in out.steps], [step.drafted[b] for step in out.steps])
            answers.append(Answer(row, places=places[: len(row)]))
        return answers


def until_end(tokens: list[int], settings: Settings) -> list[int]:
    """The tokens up to the first EOS, which they include."""
    end = next((i for i, token in enumerate(tokens) if token in settings.eos), len(tokens))
    return tokens[: end + 1]
