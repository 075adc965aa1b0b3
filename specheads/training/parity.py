"""The parity gate: is the accepted length that training computes the one that decoding reaches?

Held-out prompts are decoded with the real loop, greedily, with chains as deep as training scores. Then training's own
forward scores drafts on the resulting text. The base's next token is the same in both, so the ranks determine the
loop's steps: any difference is between the head as trained and the head as served. The same prompts are also decoded
with the tree that will be used, which may choose its nodes by more than ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from specheads.data.batches import Collator
from specheads.data.images import TYPES
from specheads.data.rows import IGNORED, Row
from specheads.decoding.generation.outputs import SpecGenerateOutput
from specheads.decoding.generation.warnings import base_length
from specheads.decoding.planner import chain
from specheads.decoding.results import AcceptanceCounts, counts_by_range, range_name
from specheads.decoding.verify.model_inputs import image_arguments
from specheads.options import OptionError
from specheads.terminal import Report, clock_time

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

_log = logging.getLogger(__name__)


class ParityError(RuntimeError):
    """Decoding accepts less, or more, of the drafts than training says."""


@dataclass(frozen=True)
class ParityConfig:
    """prompts: how many held-out rows to decode, 0 for none; prompt_tokens: prompt length for plain text (other prompts
    end before the first supervised token); max_new_tokens: per prompt; tolerance: the relative difference of the two
    accepted lengths that is attributed to rounding."""

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


@dataclass(frozen=True)
class Parity:
    """measured, simulated: tokens per step, by the loop and by training's ranks, over the same `steps` steps; served:
    tokens per step of the loop with the head's default tree (not with "auto", which may copy). by_range: `measured` by
    where a range of output positions begins, if the texts reach several."""

    measured: float
    simulated: float
    served: float
    steps: int
    tolerance: float
    by_range: Mapping[int, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.simulated) <= self.tolerance * self.simulated

    def __str__(self) -> str:
        return (
            f"accepted length {self.measured:.3f} in decoding, {self.simulated:.3f} by training's own forward on the "
            f"same text ({self.steps} steps); {self.served:.3f} with the tree that the head drafts by default"
        )

    def rows(self) -> list[list[str]]:
        """Rows of a table: how it was measured, and tokens a step."""
        lengths = (
            ("real decoding, a chain", self.measured),
            ("training's own forward on the same text", self.simulated),
            ("real decoding, the tree that the head drafts by default", self.served),
        )
        ranges = ((f"real decoding, at positions {range_name(at)}", length) for at, length in self.by_range.items())
        return [[how, f"{length:.3f}"] for how, length in (*lengths, *ranges)]

    @property
    def verdict(self) -> str:
        apart = abs(self.measured - self.simulated) / self.simulated
        relation = "agree" if self.holds else "DIFFER"
        return f"the first two {relation}: {apart:.2%} apart over {self.steps} steps, and {self.tolerance:.2%} passes"

    @property
    def metrics(self) -> dict[str, float]:
        lengths = {name: getattr(self, name) for name in ("measured", "simulated", "served")}
        lengths |= {f"measured_from_{start}": length for start, length in self.by_range.items()}
        return {f"parity_{name}": length for name, length in lengths.items()}

    def refuse(self) -> None:
        """ParityError unless they agree within the tolerance."""
        if not self.holds:
            raise ParityError(
                f"{self}: they differ by more than {self.tolerance:.1%}, so the head does not draft as it was trained. "
                "Look for a difference between the base it was trained on and this one (dtype, attention, adapters, "
                "chat template); the head is saved"
            )


def prompts_of(rows: Iterable[Mapping[str, Any]], config: ParityConfig) -> list[Row]:
    """The prompts of the first tokenized rows, as rows of input_ids: the tokens before the first supervised one, or the
    first `prompt_tokens` of plain text; with their images. Rows with images further on are left out, with a warning
    that counts them."""
    prompts: list[Row] = []
    left_out = 0
    for row in rows:
        if len(prompts) == config.prompts:
            break
        ids, labels = list(row["input_ids"]), list(row["labels"])
        documents = row.get("document_ids")
        if documents is not None:  # the first document of a packed row
            ids, labels = ids[: list(documents).count(documents[0])], labels[: list(documents).count(documents[0])]
        first = next(i for i, label in enumerate([*labels, 0]) if label != IGNORED)
        prompt = ids[: first if first > 2 else config.prompt_tokens]  # plain text may begin with a bos of its own
        types = list(row.get(TYPES) or ())
        if any(types[len(prompt) :]):
            left_out += 1
        elif prompt:
            images = {"images": row["images"], TYPES: types[: len(prompt)]} if any(types) else {}
            prompts.append({"input_ids": prompt, **images})
    if left_out:
        _log.warning("parity: rows left out because of images after the beginning of their first answer: %d", left_out)
    return prompts


def _simulate_steps(runs: list[int]) -> Iterator[int]:
    """The tokens gained at each step of a loop whose draft from token i has runs[i] right ones before the last."""
    position = 0
    while position < len(runs):
        yield 1 + runs[position]
        position += 1 + runs[position]


def decode_counted(
    model: SpecModel, prompt: list[int], **options: Any
) -> tuple[AcceptanceCounts, list[int], list[int]]:
    """What the steps after the prefill accepted, the text with its prompt, and the tokens of each step, the prefill's
    first. options: generate()'s."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
    assert isinstance(out, SpecGenerateOutput) and out.steps is not None
    return AcceptanceCounts.of(out.steps[1:]), out.sequences[0].tolist(), [len(step.tokens[0]) for step in out.steps]


@torch.no_grad()
def compare(
    model: SpecModel, prompts: list[Row], config: ParityConfig, report: Report | None = None,
    seconds: float = math.inf, processor: Any = None,
) -> Parity | None:  # fmt: skip
    """Decode each prompt and score the resulting text; None if each was a single token, which takes no step.

    seconds: no further prompt is begun after so many. processor: the base's, for prompts with images. A prompt that
    leaves no room for the new tokens in the base's context is cut to its first tokens, or left out if it has images.
    The model is left in the mode it was in.
    """
    began = time.monotonic()
    was_training = model.training
    model.eval()
    depths = model.head.scored_depths
    decoded = scored = served = AcceptanceCounts()
    texts: list[list[int]] = []
    new_tokens, room = config.max_new_tokens, None
    if (length := base_length(model.base)) is not None:
        new_tokens = min(new_tokens, length - 1)
        room = length - new_tokens
    # The base's config may have a penalty or stop words, which training does not know of.
    config_before = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=config_before.eos_token_id, pad_token_id=config_before.pad_token_id
    )
    try:
        collator = Collator(0, processor=processor)
        fitting = [row for row in prompts if not row.get("images") or room is None or len(row["input_ids"]) <= room]
        if len(fitting) < len(prompts):
            _log.warning(
                "parity: prompts with images left out because they are longer than the %d tokens that the base's "
                "context leaves for them: %d", room, len(prompts) - len(fitting),
            )  # fmt: skip
        prompts = fitting
        for done, row in enumerate(prompts, start=1):
            prompt = row["input_ids"][:room]
            asked = collator([{**row, "input_ids": prompt, "labels": prompt}])
            options = {"max_new_tokens": new_tokens, **image_arguments(model.base, asked)}
            counts, text, gains = decode_counted(model, prompt, tree=chain(depths), **options)
            labels = [*[IGNORED] * len(prompt), *text[len(prompt) :]]
            batch = collator([{**row, "input_ids": text, "labels": labels}])
            ranks = model(**{name: value.to(model.device) for name, value in batch.items()}).ranks
            if ranks is not None and len(ranks):
                runs = (ranks == 0).long().cumprod(1).sum(1).tolist()  # right tokens of the draft from each position
                decoded += counts
                texts.append(gains)
                scored += AcceptanceCounts.count(_simulate_steps(runs))
                served += decode_counted(model, prompt, draft="head", **options)[0]
            spent = time.monotonic() - began
            last = done == len(prompts) or spent >= seconds
            if report:
                left = min(spent / done * (len(prompts) - done), max(0.0, seconds - spent))
                report(1.0 if last else done / len(prompts), f"{done} prompts, {clock_time(left)} left")
            if last:
                break
    finally:
        model.train(was_training)
        model.generation_config = config_before
    if not decoded.steps or not scored.steps:
        return None
    measured, simulated, default = (counts.tokens_per_step for counts in (decoded, scored, served))
    ranges = {start: counted.tokens_per_step for start, counted in counts_by_range(texts).items()}
    by_range = ranges if len(ranges) > 1 else {}
    return Parity(measured, simulated, default, decoded.steps, config.tolerance, by_range)
