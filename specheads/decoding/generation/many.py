"""generate_many(): the texts of many prompts, in a batch whose finished rows take the next prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.decoding import Decoding
from specheads.decoding.generation.many_arguments import (
    check_limits,
    encode_prompt,
    options_of,
    refuse_many_options,
    require_list,
    with_stop_strings,
)
from specheads.decoding.generation.outputs import Statistics
from specheads.decoding.generation.slots import SinglePrompt, Slot, SlotDecoder, prepare
from specheads.decoding.planner import Plan
from specheads.decoding.probs.processors import adapt, possibly_stateful
from specheads.decoding.probs.randomness import row_seed, seeds_for
from specheads.decoding.results import Step
from specheads.decoding.verify.hf_base import text_config, unwrapped
from specheads.decoding.verify.rope_switch import rope_switch
from specheads.options import require_whole

logger = hf_logging.get_logger(__name__)


@dataclass
class Continuation(Statistics):
    """What follows prompt number `index`: tokens, end token included, and with a tokenizer their text.

    seed: generate() with it gives the same text for the prompt alone; None where nothing is random. steps: the row's
    own, its prefill first; their seconds, and those in `statistics()`, are those of the whole batch.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    seed: int | None
    steps: list[Step]
    lossless: bool


def generate_many(
    base: PreTrainedModel,
    prompts: Iterable[str | Sequence[int]],
    *,
    batch_size: int = 8,
    draft: Drafter | str | bool | None = None,
    tree: Plan | str | None = None,
    accept: Acceptance | str | None = None,
    seed: int | Sequence[int] | Callable[[int], int] | None = None,
    tokenizer: Any = None,
    stream: bool = False,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    report: Callable[[int, int | None], None] | None = None,
    output_divergences: bool = False,
    compile: bool | str = False,
    kernels: bool = True,
    **options: Any,
) -> list[Continuation] | Iterator[Continuation]:
    """The text of each prompt, `batch_size` at a time: as soon as a text ends, the next prompt takes its row.

    Each text is the one generate() gives for its prompt alone, in float32 token for token; if it is sampled, with the
    seed of the result, and if its drafts are sampled, with the same tree. The exception is a lossy rule with drafts
    that depend on the batch: automatic ones, and those of n-grams that learn from all rows.

    prompts: ids or, with a tokenizer, texts; a list is checked before anything runs, an iterator as it is read. draft,
    tree, accept, output_divergences, compile, kernels and `options` (do_sample, eos_token_id …) are generate()'s.
    max_new_tokens: one number, or one for each prompt. A `prefix_allowed_tokens_fn` is called with the index of the
    prompt. seed: one number, from which each prompt's own is derived, one for each, or a function of the prompt's
    index. stream: return an iterator over the results as they finish, not a list in the order of the prompts.
    on_tokens(index, tokens) is called as tokens are gained, report(done, total) after each prompt; the total of an
    iterator is None.

    Batches are not refilled for an encoder-decoder, or with a drafter that is not `refillable`. A prompt runs alone if
    a batch would change its text: if a logits processor may keep state, if the text may reach the length at which the
    base's positions change or outgrow a draft model's, or if the model takes more than its ids. The log says so.

    ValueError and TypeError name the index of the prompt.
    """
    base = unwrapped(base)
    require_whole("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1 prompt")
    decoding = Decoding.parse(
        base, draft=draft, tree=tree, accept=accept, output_divergences=output_divergences,
        compile=compile, kernels=kernels,
    )  # fmt: skip
    refuse_many_options(base, options)
    options = with_stop_strings(base, options, tokenizer)
    encoded: Iterator[list[int]] = (
        encode_prompt(base, index, prompt, tokenizer, options_of(index, options))
        for index, prompt in enumerate(require_list(prompts))
    )
    total = None
    if isinstance(prompts, Sequence):
        check_limits(options, len(prompts))
        listed = list(encoded)
        total, encoded = len(listed), iter(listed)
    if isinstance(seed, list | tuple) and total is not None and len(seed) != total:
        raise ValueError(f"seed= has {len(seed)} numbers for {total} prompts; give one for each, or a single one")
    if isinstance(seed, Integral):
        seed = int(seed)
    elif seed is not None and not callable(seed):
        count: Any = seed  # a sequence, or what seeds_for() refuses
        seed = seeds_for(seed, len(count) if total is None else total)
    many = _Many(decoding, batch_size, seed, tokenizer, on_tokens, options)
    results = many.results(encoded, total, report)
    return results if stream else sorted(results, key=lambda one: one.index)


@dataclass
class _Many:
    """One call of generate_many(): its arguments."""

    decoding: Decoding
    batch_size: int
    seed: int | Sequence[int] | Callable[[int], int] | None
    tokenizer: Any
    on_tokens: Callable[[int, list[int]], None] | None
    options: Mapping[str, Any]

    def results(
        self, encoded: Iterator[list[int]], total: int | None, report: Callable[[int, int | None], None] | None
    ) -> Iterator[Continuation]:
        """The results in the order in which they finish."""
        prompts = (self._prepare(index, ids) for index, ids in enumerate(encoded))
        first = next(prompts, None)
        if first is None:
            return
        if self.seed is None and first.do_sample:
            self.seed = int(torch.randint(2**62, ()))
        for done, slot in enumerate(self._slots(first, chain([first], prompts)), start=1):
            if report is not None:
                report(done, total)
            yield self._finish(slot)

    def _prepare(self, index: int, ids: list[int]) -> SinglePrompt:
        return prepare(self.decoding.base, index, ids, options_of(index, self.options))

    def _slots(self, first: SinglePrompt, prompts: Iterator[SinglePrompt]) -> Iterator[Slot]:
        decoder = SlotDecoder(self.decoding, self._seed_of, self.on_tokens)
        size, reason = self._unfilled_batch(first)
        alone: list[tuple[SinglePrompt, str]] = []
        waiting = self._waiting(prompts, alone)
        for number, batch in enumerate(iter(lambda: list(islice(waiting, size)), [])):
            if number == 1:  # a single batch has nothing to refill
                logger.warning("batches are not refilled but decoded %d prompts at a time: %s", size, reason)
            yield from decoder.run(batch, waiting if reason is None else None)
        if alone:
            prompt, why = alone[0]
            logger.warning("prompts decoded alone: %d, such as prompt %d: %s", len(alone), prompt.index, why)
        for prompt, _ in alone:  # prepared again: a time limit starts now
            yield from decoder.run([self._prepare(prompt.index, prompt.source)])

    def _waiting(
        self, prompts: Iterator[SinglePrompt], alone: list[tuple[SinglePrompt, str]]
    ) -> Iterator[SinglePrompt]:
        """The prompts that may share a batch; the others are added to `alone`, with the reason."""
        for prompt in prompts:
            if (why := self._why_alone(prompt)) is None:
                yield prompt
            else:
                alone.append((prompt, why))

    def _unfilled_batch(self, first: SinglePrompt) -> tuple[int, str | None]:
        """The batch size, and why batches are not refilled; None if they are."""
        if stateful := possibly_stateful(adapt(first.processors)):
            return 1, f"{type(stateful[0]).__name__} may keep state from call to call, so it cannot know the rows apart"
        return self.batch_size, why_unfilled(self.decoding.base, self.decoding.drafter)

    @cached_property
    def _boundary(self) -> int | None:
        base = self.decoding.base
        switch = rope_switch(base, text_config(base), 1, 1)
        return None if switch is None else switch.boundary

    def _why_alone(self, prompt: SinglePrompt) -> str | None:
        if not prompt.is_plain:
            return f"{type(self.decoding.base).__name__} takes more than ids"
        boundary = self._boundary
        if boundary is not None and prompt.longest > boundary:
            return f"the base's positions change at {boundary} tokens, and its text may have {prompt.longest}"
        drafter = self.decoding.drafter
        longest = None if drafter is None else drafter.longest
        if longest is not None and prompt.longest > longest:
            return f"the drafter reads {longest} tokens, and its text may have {prompt.longest}"
        return None

    def _seed_of(self, prompt: SinglePrompt) -> int | None:
        if self.seed is None or isinstance(self.seed, int):
            return None if self.seed is None else row_seed(self.seed, prompt.index)
        if callable(self.seed):
            return self.seed(prompt.index)
        if prompt.index >= len(self.seed):
            raise ValueError(f"prompt {prompt.index}: seed= has {len(self.seed)} numbers; give one for each prompt")
        return self.seed[prompt.index]

    def _finish(self, slot: Slot) -> Continuation:
        prompt, text = slot.prompt, None
        self.decoding.warn_past_limits(len(prompt.ids) + len(slot.tokens))
        if self.tokenizer is not None:
            text = self.tokenizer.decode(slot.tokens, skip_special_tokens=True)
        seed, lossless = self._seed_of(prompt), self.decoding.is_lossless(self.batch_size)
        return Continuation(prompt.index, prompt.source, slot.tokens, text, seed, slot.steps, lossless)


def why_unfilled(base: PreTrainedModel, drafter: Drafter | None) -> str | None:
    """Why no prompt can take the row of a finished one; None if it can."""
    if base.config.is_encoder_decoder:
        return f"{type(base).__name__} is an encoder-decoder"
    if drafter is not None and not drafter.refillable:
        return f"{type(drafter).__name__} cannot change the prompt of one row"
    return None
