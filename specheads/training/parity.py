"""The parity gate: what training says a head is worth is what decoding makes of it.

Held-out prompts are decoded with the real loop, greedily, by a chain as deep as training scores. Then training's own
forward scores the drafts on the text that came out. The base's next token is the same in both, so the loop's steps can
be told from the ranks: any difference is one between the head that was trained and the head that is served. The same
prompts are decoded with the tree that will be used too, which may choose its nodes by more than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from specheads.data.batches import Collator
from specheads.data.rows import IGNORED
from specheads.decoding.outputs import SpecGenerateOutput
from specheads.decoding.planner import chain
from specheads.options import OptionError, refuse_unknown

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel


class ParityError(RuntimeError):
    """Decoding accepts less, or more, of the drafts than training says."""


@dataclass(frozen=True)
class ParityConfig:
    """prompts: held-out rows that are decoded, 0 for none; prompt_tokens: of a row of plain text, those before the
    first supervised one otherwise; max_new_tokens: of each; tolerance: the relative difference of the two accepted
    lengths that rounding may make."""

    prompts: int = 8
    prompt_tokens: int = 32
    max_new_tokens: int = 64
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        for name, least in (("prompts", 0), ("prompt_tokens", 1), ("max_new_tokens", 8)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise OptionError(
                    f"{{parity.{name}}}: expected a whole number of at least {least}", **{f"parity.{name}": value}
                )
        if not 0 <= self.tolerance < 1:
            raise OptionError(
                "{parity.tolerance}: expected a share from 0 to below 1", **{"parity.tolerance": self.tolerance}
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> ParityConfig:
        refuse_unknown(options, [field.name for field in fields(cls)], section="parity.")
        return cls(**options)


@dataclass(frozen=True)
class Parity:
    """measured and simulated: tokens a step, by the loop and by training's ranks, over the same `steps` steps; served:
    tokens a step of the loop with the head's default tree."""

    measured: float
    simulated: float
    served: float
    steps: int
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.simulated) <= self.tolerance * self.simulated

    def __str__(self) -> str:
        return (
            f"accepted length {self.measured:.3f} in decoding, {self.simulated:.3f} by training's own forward on the "
            f"same text ({self.steps} steps); {self.served:.3f} with the tree that generate() drafts by default"
        )

    def rows(self) -> list[list[str]]:
        """What is shown as a table: how it was measured, and tokens a step."""
        found = (
            ("real decoding, a chain", self.measured),
            ("training's own forward on the same text", self.simulated),
            ("real decoding, the tree that generate() drafts", self.served),
        )
        return [[how, f"{length:.3f}"] for how, length in found]

    @property
    def verdict(self) -> str:
        apart = abs(self.measured - self.simulated) / self.simulated
        said = "agree" if self.holds else "DIFFER"
        return f"the first two {said}: {apart:.2%} apart over {self.steps} steps, and {self.tolerance:.2%} passes"

    @property
    def metrics(self) -> dict[str, float]:
        return {f"parity_{name}": getattr(self, name) for name in ("measured", "simulated", "served")}

    def refuse(self) -> None:
        """ParityError unless they agree within the tolerance."""
        if not self.holds:
            raise ParityError(
                f"{self}: they differ by more than {self.tolerance:.1%}, so the head does not draft as it was trained. "
                "Look for a difference between the base it was trained on and this one (dtype, attention, adapters, "
                "chat template); the head is saved"
            )


def prompts_of(rows: Iterable[Mapping[str, Any]], config: ParityConfig) -> list[list[int]]:
    """The first prompts of tokenized rows: what stands before their first supervised token, or of plain text
    `prompt_tokens`."""
    found: list[list[int]] = []
    for row in rows:
        if len(found) == config.prompts:
            break
        ids, labels = list(row["input_ids"]), list(row["labels"])
        documents = row.get("document_ids")
        if documents is not None:  # of a packed row the first document
            ids, labels = ids[: list(documents).count(documents[0])], labels[: list(documents).count(documents[0])]
        first = next(i for i, label in enumerate([*labels, 0]) if label != IGNORED)
        prompt = ids[: first if first > 1 else config.prompt_tokens]
        if prompt:
            found.append(prompt)
    return found


@dataclass
class _Steps:
    """Tokens gained and the steps it took."""

    tokens: int = 0
    steps: int = 0

    def add(self, gains: Iterable[int], places: int) -> None:
        """Steps of so many tokens each, from the first of the places where a whole draft has targets past the last."""
        place = 0
        for gain in gains:
            if place >= places:
                break
            place += gain
            self.steps += 1
        self.tokens += place

    @property
    def length(self) -> float:
        return self.tokens / self.steps


def _jumps(runs: list[int]) -> Iterator[int]:
    """The steps of a loop whose drafts have `runs` right at each place."""
    place = 0
    while place < len(runs):
        yield 1 + runs[place]
        place += 1 + runs[place]


def _decoded(out: Any) -> tuple[list[int], list[int]]:
    """The tokens that each step of a loop gained behind the prefill's, and the text with its prompt."""
    assert isinstance(out, SpecGenerateOutput) and out.steps is not None
    return [len(step.tokens[0]) for step in out.steps[1:]], out.sequences[0].tolist()


@torch.no_grad()
def compare(
    model: SpecModel, prompts: list[list[int]], config: ParityConfig, report: Callable[[float], None] | None = None
) -> Parity | None:
    """Decode each prompt and score what came out; None where no text was long enough to compare.

    The model is left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    depths = model.head.scored_depths
    decoded, scored, served = _Steps(), _Steps(), _Steps()
    # The base's own may have a penalty or stop words, which training's count knows nothing of.
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    try:
        for done, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=model.device)
            asked: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "return_dict_in_generate": True}
            gains, text = _decoded(model.generate(ids, tree=chain(depths), **asked))
            # The prefill draws the first token, so drafts are of those behind it.
            labels = [*[IGNORED] * (len(prompt) + 1), *text[len(prompt) + 1 :]]
            batch = Collator(0)([{"input_ids": text, "labels": labels}])
            ranks = model(**{name: value.to(model.device) for name, value in batch.items()}).ranks
            if ranks is not None and len(ranks):
                runs = (ranks == 0).long().cumprod(1).sum(1).tolist()  # of the draft behind each token
                # At the last place the text may end before the bonus token of a whole draft.
                decoded.add(gains, len(runs) - 1)
                scored.add(_jumps(runs), len(runs) - 1)
                served.add(_decoded(model.generate(ids, **asked))[0], len(runs) - 1)
            if report:
                report((done + 1) / len(prompts))
    finally:
        model.train(was_training)
        model.generation_config = own
    if not decoded.steps or not scored.steps:
        return None
    return Parity(decoded.length, scored.length, served.length, decoded.steps, config.tolerance)
