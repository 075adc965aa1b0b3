"""Slots: the rows of a batch, each with a prompt of its own that another may replace once it has finished.

Shapes: B batch rows, T prompt columns, S source columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.decoding.generation.decoding import Decoding
from specheads.decoding.generation.generate import call_hf_generate
from specheads.decoding.generation.stopping import Stopping, gives_scores
from specheads.decoding.probs.sampler import RowSampler
from specheads.decoding.refill import NewRows
from specheads.decoding.results import Step
from specheads.decoding.verify.model_inputs import ModelInputs, input_device, model_inputs
from specheads.decoding.verify.seq2seq import Source


@dataclass(frozen=True)
class SinglePrompt:
    """ids: the text to continue, which for an encoder-decoder is the decoder's; source: the prompt as given.

    inputs: what the model takes besides ids. hidden (S, H): the encoded source, None without an encoder.
    """

    index: int
    source: list[int]
    ids: list[int]
    processors: LogitsProcessorList
    stop: Stopping
    do_sample: bool
    inputs: ModelInputs
    hidden: Tensor | None

    @property
    def longest(self) -> int:
        """The most tokens that its text may have, prompt included."""
        return len(self.ids) + self.stop.limit

    @property
    def is_plain(self) -> bool:
        """Does the model take nothing besides its ids, or its source's?"""
        return not self.inputs.prompt and self.inputs.positions is None


def prepare(base: PreTrainedModel, index: int, ids: list[int], options: Mapping[str, Any]) -> SinglePrompt:
    """Prompt number `index`, under generate()'s options. Errors name the index."""

    def capture(
        base: PreTrainedModel, input_ids: Tensor, *, logits_processor: LogitsProcessorList, stopping_criteria: Any,
        generation_config: Any, **model_kwargs: Any,
    ) -> SinglePrompt:  # fmt: skip
        rows, columns = input_ids.tolist(), input_ids.shape[1]
        mask = None if base.config.is_encoder_decoder else model_kwargs.get("attention_mask")
        encoded = model_kwargs["encoder_outputs"][0][0] if base.config.is_encoder_decoder else None
        return SinglePrompt(
            index, ids, rows[0], logits_processor,
            Stopping(
                stopping_criteria, rows, columns, [columns], 0, input_ids.device, gives_scores(generation_config)
            ),
            bool(generation_config.do_sample), model_inputs(base, input_ids, mask, None, model_kwargs), encoded,
        )  # fmt: skip

    tensor = torch.tensor([ids], device=input_device(base))
    try:
        return call_hf_generate(base, capture, tensor, attention_mask=torch.ones_like(tensor), **options)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"prompt {index}: {error}") from error


@dataclass
class Slot:
    """A prompt in a row of the batch, its tokens and steps so far, and whether it has finished."""

    prompt: SinglePrompt
    finished: bool = False
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step, row: int) -> None:
        """Add what a step gave to this row of the batch."""
        self.steps.append(step_of_row(step, row))
        self.tokens += step.tokens[row]


def step_of_row(step: Step, row: int) -> Step:
    """A step of one row alone; its seconds are those of the whole batch."""

    def only(values: list) -> list:
        return values[row : row + 1]

    return Step(
        only(step.tokens), only(step.accepted), only(step.ranks), only(step.drafted), step.seconds,
        divergences=only(step.divergences), parents=only(step.parents), path=only(step.path),
    )  # fmt: skip


@dataclass(frozen=True)
class SlotDecoder:
    """Decodes prompts in slots. seed_of: prompt → its seed. on_tokens(index, tokens): called as tokens are gained."""

    decoding: Decoding
    seed_of: Callable[[SinglePrompt], int | None]
    on_tokens: Callable[[int, list[int]], None] | None

    def run(self, prompts: Sequence[SinglePrompt], waiting: Iterator[SinglePrompt] | None = None) -> Iterator[Slot]:
        """Decode the prompts as one batch → their slots, in the order in which they finish.

        waiting: prompts that take the rows of finished ones; None: such rows idle.
        """
        first, device = prompts[0], input_device(self.decoding.base)
        slots = [Slot(prompt) for prompt in prompts]
        sampler = RowSampler(
            [one.processors for one in prompts], [one.index for one in prompts], do_sample=first.do_sample,
            seeds=self._seeds(prompts),
        )  # fmt: skip

        def stop(row: int, ids: list[int], count: int, *scores: list[Tensor]) -> int:
            kept = slots[row].prompt.stop(0, ids, count, *scores)
            slots[row].finished |= kept >= 0
            return kept

        def refill(finished: list[int]) -> NewRows | None:
            assert waiting is not None
            new = list(islice(waiting, len(finished)))
            if not new:
                return None
            rows = finished[: len(new)]
            for row, prompt in zip(rows, new, strict=True):
                slots[row] = Slot(prompt)
                sampler.replace_row(row, prompt.processors, prompt.index)
            return NewRows(rows, *_pack(new, device), [one.stop.limit for one in new], self._seeds(new))

        target, plan = self.decoding.prepare(device, first.do_sample, source=_stack_sources(prompts))
        inputs = first.inputs if len(prompts) == 1 else ModelInputs(rows_may_part=True)
        for step in self.decoding.steps(
            target, plan, *_pack(prompts, device), sampler=sampler, stop=stop, eos=first.stop.eos,
            max_new_tokens=[one.stop.limit for one in prompts], inputs=inputs,
            keep_scores=first.stop.scores is not None,
            refill=None if waiting is None else refill,
        ):  # fmt: skip
            for row, slot in enumerate(slots):
                if not step.tokens[row]:
                    continue
                slot.add(step, row)
                if self.on_tokens is not None:
                    self.on_tokens(slot.prompt.index, step.tokens[row])
                if slot.finished:
                    yield slot

    def _seeds(self, prompts: Sequence[SinglePrompt]) -> list[int] | None:
        seeds = [seed for prompt in prompts if (seed := self.seed_of(prompt)) is not None]
        return seeds or None


def _pack(prompts: Sequence[SinglePrompt], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (B, T), packed left, and lengths (B,)."""
    rows = [torch.tensor(prompt.ids, device=device) for prompt in prompts]
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows], device=device)


def _stack_sources(prompts: Sequence[SinglePrompt]) -> Source | None:
    """The encoded sources, padded on the right; None without an encoder."""
    states = [prompt.hidden for prompt in prompts if prompt.hidden is not None]
    if not states:
        return None
    mask = pad_sequence([torch.ones(len(one), dtype=torch.long, device=one.device) for one in states], batch_first=True)
    return Source(pad_sequence(states, batch_first=True), mask, [list(prompt.source) for prompt in prompts])
