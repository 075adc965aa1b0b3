"""generate_many(): the texts of many prompts, in a batch whose finished rows take the next prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from numbers import Integral
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.acceptance import Acceptance
from specheads.decoding.acceptance.named import as_rule
from specheads.decoding.compiled import CompiledSteps, compiled_steps
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.drafters.named import either
from specheads.decoding.generation.context_limits import base_length, warn_past_limits
from specheads.decoding.generation.hf_options import (
    check_divergences,
    refuse_arguments,
    stop_string_criteria,
    without_stop_strings,
)
from specheads.decoding.generation.outputs import Statistics
from specheads.decoding.generation.single_prompt import SinglePrompt, prepare
from specheads.decoding.generation.slots import Slot, SlotDecoder
from specheads.decoding.loop import Step
from specheads.decoding.planner import Plan, as_plan
from specheads.decoding.probs.processors import adapt, possibly_stateful
from specheads.decoding.probs.randomness import row_seed, seeds_for
from specheads.decoding.target.hf_base import text_config, unwrapped
from specheads.decoding.target.rope_switch import rope_switch
from specheads.options import shown

logger = hf_logging.get_logger(__name__)

# What says how one prompt's text is returned, or how many there are.
REFUSED = (
    "input_ids", "attention_mask", "streamer", "return_dict_in_generate", "output_scores", "output_logits",
    "num_return_sequences",
)  # fmt: skip


@dataclass
class Continuation(Statistics):
    """What follows the prompt of number `index`: tokens, the end included, and with a tokenizer their text.

    seed: with which generate() gives this text to the prompt alone; None where nothing is random. steps: the row's own,
    its prefill first; their seconds are those of the whole batch, as they are in `statistics()`.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    seed: int | None
    steps: list[Step]
    lossless: bool


@torch.no_grad()
def generate_many(
    base: PreTrainedModel,
    prompts: Iterable[str | Sequence[int]],
    *,
    batch_size: int = 8,
    draft: Drafter | str | bool | None = None,
    drafter: Drafter | str | None = None,
    tree: Plan | str | None = None,
    accept: Acceptance | str | None = None,
    seed: int | Sequence[int] | None = None,
    tokenizer: Any = None,
    stream: bool = False,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    report: Callable[[int, int | None], None] | None = None,
    output_divergences: bool = False,
    compile: bool | str = False,
    **options: Any,
) -> list[Continuation] | Iterator[Continuation]:
    """The text of each prompt, `batch_size` at a time: as soon as a text ends, the next prompt takes its row.

    Each text is the one generate() gives to its prompt alone, in float32 token for token; if it is sampled, with the
    seed of the result, and if its drafts are sampled, with the same tree.

    prompts: ids or, with a tokenizer, texts; a list is checked before anything runs, an iterator as it is read. draft,
    drafter, tree, accept, output_divergences, compile and `options` (max_new_tokens, do_sample, eos_token_id …) are
    generate()'s. A `prefix_allowed_tokens_fn` is called with the index of the prompt. seed: one number, from
    which each prompt has its own, or one for each. stream: return an iterator over the results as they finish, not a
    list in the order of the prompts. on_tokens(index, tokens) is called as tokens are gained, report(done, total) after
    each prompt; the total of an iterator is None.

    Batches are not refilled with an encoder-decoder, or with a drafter that is not `refillable`. A prompt runs alone
    where its batch would change its text: if a logits processor may keep state, if its text may get to where the base's
    positions change or past a draft model's, or if the model makes more of it than ids. A line in the log says so.

    ValueError and TypeError name the index of the prompt.
    """
    base = unwrapped(base)
    drafts, rule = either(draft, drafter), as_rule(accept)
    plan = as_plan(tree, drafts)
    if drafts is None and plan is not None:
        raise ValueError("tree= says what to draft, but nothing drafts (no draft=); give one of the two")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1 prompt")
    if output_divergences:
        check_divergences(rule, True)
    _refuse_options(base, options)
    options = _with_stop_strings(base, options, tokenizer)
    encoded: Iterator[list[int]] = (
        _encode(base, index, prompt, tokenizer, options) for index, prompt in enumerate(_listed(prompts))
    )
    total = None
    if isinstance(prompts, Sequence):
        listed = list(encoded)
        total, encoded = len(listed), iter(listed)
    if isinstance(seed, Sequence) and total is not None and len(seed) != total:
        raise ValueError(f"seed= has {len(seed)} numbers for {total} prompts; give one for each, or a single one")
    if isinstance(seed, Integral):
        seed = int(seed)
    elif seed is not None:
        count: Any = seed  # a sequence, or what seeds_for() refuses
        seed = seeds_for(seed, len(count) if total is None else total)
    compiled = compiled_steps(base, compile) if compile else None
    many = _Many(
        base, drafts, plan, rule, batch_size, seed, tokenizer, on_tokens, output_divergences, compiled, options
    )
    results = many.results(encoded, total, report)
    return results if stream else sorted(results, key=lambda one: one.index)


@dataclass
class _Many:
    """One call of generate_many(): its parts as given there."""

    base: PreTrainedModel
    drafter: Drafter | None
    plan: Plan | None
    accept: Acceptance
    batch_size: int
    seed: int | Sequence[int] | None
    tokenizer: Any
    on_tokens: Callable[[int, list[int]], None] | None
    divergences: bool
    compiled: CompiledSteps | None
    options: Mapping[str, Any]

    @torch.no_grad()
    def results(
        self, encoded: Iterator[list[int]], total: int | None, report: Callable[[int, int | None], None] | None
    ) -> Iterator[Continuation]:
        """The results in the order in which they finish."""
        prompts = (prepare(self.base, i, ids, self.options) for i, ids in enumerate(encoded))
        first = next(prompts, None)
        if first is None:
            return
        if self.seed is None and first.do_sample:
            self.seed = int(torch.randint(2**62, ()))
        for done, slot in enumerate(self._slots(first, chain([first], prompts)), start=1):
            if report is not None:
                report(done, total)
            yield self._finish(slot)

    def _slots(self, first: SinglePrompt, prompts: Iterator[SinglePrompt]) -> Iterator[Slot]:
        decoder = SlotDecoder(
            self.base, self.drafter, self.plan, self.accept, self.divergences, self.compiled, self._seed_of,
            self.on_tokens,
        )  # fmt: skip
        size, reason = self._unfilled_batch(first)
        if reason is not None:
            logger.warning("batches are not refilled but decoded %d prompts at a time: %s", size, reason)
            while batch := list(islice(prompts, size)):
                yield from decoder.run(batch)
            return
        alone: list[tuple[SinglePrompt, str]] = []
        waiting = self._waiting(prompts, alone)
        if batch := list(islice(waiting, self.batch_size)):
            yield from decoder.run(batch, waiting)
        if alone:
            prompt, why = alone[0]
            logger.warning("prompts decoded alone: %d, such as prompt %d: %s", len(alone), prompt.index, why)
        for prompt, _ in alone:
            yield from decoder.run([prompt])

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
        """The size of batches that are not refilled, and why they are not; None if they are."""
        if stateful := possibly_stateful(adapt(first.processors)):
            return 1, f"{type(stateful[0]).__name__} may keep state from call to call, so it cannot know the rows apart"
        if self.base.config.is_encoder_decoder:
            return self.batch_size, f"{type(self.base).__name__} is an encoder-decoder"
        if self.drafter is not None and not self.drafter.refillable:
            return self.batch_size, f"{type(self.drafter).__name__} cannot change the prompt of one row"
        return self.batch_size, None

    @cached_property
    def _boundary(self) -> int | None:
        switch = rope_switch(self.base, text_config(self.base), 1, 1)
        return None if switch is None else switch.boundary

    def _why_alone(self, prompt: SinglePrompt) -> str | None:
        if not prompt.is_plain:
            return f"{type(self.base).__name__} takes more than ids"
        boundary = self._boundary
        if boundary is not None and prompt.longest > boundary:
            return f"the base's positions change at {boundary} tokens, and its text may have {prompt.longest}"
        longest = None if self.drafter is None else self.drafter.longest
        if longest is not None and prompt.longest > longest:
            return f"the drafter reads {longest} tokens, and its text may have {prompt.longest}"
        return None

    def _seed_of(self, prompt: SinglePrompt) -> int | None:
        if self.seed is None or isinstance(self.seed, int):
            return None if self.seed is None else row_seed(self.seed, prompt.index)
        if prompt.index >= len(self.seed):
            raise ValueError(f"prompt {prompt.index}: seed= has {len(self.seed)} numbers; give one for each prompt")
        return self.seed[prompt.index]

    def _finish(self, slot: Slot) -> Continuation:
        prompt, text = slot.prompt, None
        trained_length = None if self.drafter is None else self.drafter.trained_length
        warn_past_limits(self.base, trained_length, len(prompt.ids) + len(slot.tokens))
        if self.tokenizer is not None:
            text = self.tokenizer.decode(slot.tokens, skip_special_tokens=True)
        return Continuation(
            prompt.index, prompt.source, slot.tokens, text, self._seed_of(prompt), slot.steps, self.accept.lossless
        )


def _listed(prompts: Any) -> Iterable[Any]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={shown(prompts)} must be a list of prompts, each a text or a list of ids")
    return prompts


def _refuse_options(base: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """ValueError for options that have no meaning for many prompts."""
    refuse_arguments(options)
    config = options.get("generation_config") or base.generation_config
    for name in REFUSED:
        if options.get(name) not in (None, False, 1):
            raise ValueError(f"generate_many() takes no {name}=; call generate() for a batch of its own")
    if (options.get("num_beams") or config.num_beams or 1) > 1:
        raise ValueError("beam search does not combine with refilled batches; give num_beams=1, or call generate()")


def _with_stop_strings(base: PreTrainedModel, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options with their stop strings as a criterion: it reads the whole vocabulary, so it is made once."""
    config = options.get("generation_config") or base.generation_config
    strings = options.get("stop_strings") or config.stop_strings
    if not strings:
        return options
    criteria = stop_string_criteria(strings, tokenizer, options.get("stopping_criteria"))
    config = without_stop_strings(config)
    return {**options, "stop_strings": None, "stopping_criteria": criteria, "generation_config": config}


def _encode(
    base: PreTrainedModel, index: int, prompt: Any, tokenizer: Any, options: Mapping[str, Any]
) -> list[int]:  # fmt: skip
    """A prompt's ids. TypeError or ValueError, with its index, for one that cannot be continued."""
    if isinstance(prompt, str) and tokenizer is None:
        raise TypeError(f"prompt {index} is text, {shown(prompt)}; give tokenizer= too, or its ids")
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
        raise TypeError(f"prompt {index} must be a text or a list of ids, not {shown(prompt)}")
    if not ids:
        raise ValueError(f"prompt {index} has no tokens; give at least one")
    weight: Any = base.get_input_embeddings().weight
    if not 0 <= min(ids) <= max(ids) < (len(weight) or max(ids) + 1):  # a sharded matrix may be empty here
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"prompt {index} holds id {wrong}, and the model has embeddings for 0 to {len(weight) - 1}")
    if base.config.is_encoder_decoder:
        return list(ids)
    config = options.get("generation_config") or base.generation_config
    most = options.get("max_length") or (
        config.max_length if config.max_length != GenerationConfig().max_length else None
    )
    if options.get("max_new_tokens") or config.max_new_tokens:
        most = None
    for limit, what in ((most, "max_length"), (base_length(base), "the base's max_position_embeddings")):
        if limit is not None and len(ids) >= limit:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, and {what}={limit} leaves no room for more; give a shorter one"
            )
    return list(ids)
