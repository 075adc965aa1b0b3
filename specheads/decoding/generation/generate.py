"""generate(): decode() behind Hugging Face's front door.

It enters through `custom_generate`, so logits processors, stopping criteria, streamers and GenerationConfig mean what
they mean in transformers. Shapes: B batch rows, T prompt columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput
from transformers.utils import logging as hf_logging

from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.decoding import Decoding
from specheads.decoding.generation.hf_options import (
    check_prompts,
    effective_config,
    refuse_arguments,
    refuse_options,
    stop_string_criteria,
    without_stop_strings,
)
from specheads.decoding.generation.kept_text import keep_text, kept_prefix, take_cache
from specheads.decoding.generation.outputs import SpecGenerateOutput, SpecSeq2SeqOutput, stack_by_position
from specheads.decoding.generation.prompt_batches import left_order, pack_left, unpadded_rows
from specheads.decoding.generation.stopping import Stopping, cut_row, gives_scores
from specheads.decoding.generation.warnings import warn_of_holes, warn_of_right_padding
from specheads.decoding.planner import Plan
from specheads.decoding.probs.randomness import seeds_for
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.results import Step
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import unwrapped
from specheads.decoding.verify.model_inputs import CACHE_NAMES, ModelInputs, model_inputs
from specheads.decoding.verify.seq2seq import Source

logger = hf_logging.get_logger(__name__)


def generate(
    base: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: Drafter | str | bool | None = None,
    tree: Plan | str | None = None,
    accept: Acceptance | str | None = None,
    seed: int | Sequence[int] | None = None,
    output_divergences: bool = False,
    compile: bool | str = False,
    kernels: bool = True,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Tensor | ModelOutput:
    """`base.generate(...)` with draft trees, for any Hugging Face language model: same arguments, same text.

    draft: what drafts: a drafter (a `DraftModel`, a head …), "lookup", "ngram" or "maxgram"; None or False: plain
    decoding through the same loop. tree: the plan of the trees, or its text such as
    "chain:3" (default: the drafter's; for encoder-decoders a chain). accept: the rule, or its text such as
    "fuzzy:js:0.2" (default: `Exact`, lossless). seed: for sampling, one number or one for each row; a row's text
    depends on its own seed alone, and `probs.randomness.row_seeds` derives the rows' seeds from one number.
    output_divergences: for a `Fuzzy` rule, keep D at every drafted position in the steps (see `Step`); it needs
    return_dict_in_generate=True.

    compile: decode with steps compiled by torch; each new shape is compiled once (the log says so and how long it
    took; torch keeps the code on disk). True, or the name of a torch.compile backend, refused if torch has none of
    that name. What cannot be compiled is decoded without compiling, after a warning.

    kernels: on a CPU, passes over few tokens use our own products and attention, built once for the processor; False:
    torch's. Compiled, or with linear layers of 64 MB or more.

    inputs: ids (B, T). Arguments of the model (pixel_values, position_ids, token_type_ids …) are handled as generate()
    handles them, or refused by name. adapter_names: those of each row, for a peft model. past_key_values: a
    DynamicCache, empty or with the first tokens of the text, which are then not read; afterwards it holds the new text
    too (docs/compatibility.md). A prompt padded on the right continues after its own last token, as if it were padded
    on the left, and masked positions between tokens are left out; the log says so where transformers differs.
    Logits processors see each node's own prefix, with the caller's padding. One that keeps state from call to call
    stops the drafting, except xgrammar's, whose state follows the path. Stopping criteria see all rows after each
    token, as in transformers; rows ahead of the others decode further until the others have caught up.

    Returns ids, or a `SpecGenerateOutput` (`SpecSeq2SeqOutput`) for return_dict_in_generate=True. With num_beams > 1
    drafting is refused, and the result is that of the base's own beam search.
    """
    base, front = unwrapped(base), base
    if kwargs.get("adapter_names") is None:
        front = base
    elif front is base:
        raise ValueError(
            f"adapter_names= chooses among the adapters of a peft model, and this is {type(base).__name__}; give the "
            "peft model itself"
        )
    elif not base.config.is_encoder_decoder:
        Target(base)  # its tests of the base have one row, and the adapters are those of all rows
    config = effective_config(base, generation_config)
    searches_beams = (kwargs.get("num_beams") or config.num_beams or 1) > 1
    decoding = Decoding.parse(
        base, draft=draft, tree=tree, accept=accept, output_divergences=output_divergences,
        compile=False if searches_beams else compile, kernels=kernels,
    )  # fmt: skip
    if output_divergences and not kwargs.get("return_dict_in_generate", config.return_dict_in_generate):
        raise ValueError("output_divergences=True comes with the steps; give return_dict_in_generate=True too")
    prompts = inputs if inputs is not None else kwargs.get("input_ids")
    check_prompts(base, prompts, images=kwargs.get("pixel_values") is not None)
    refuse_arguments(kwargs)
    cache = None if searches_beams else take_cache(base, kwargs)
    if searches_beams:
        if decoding.drafter is not None or accept is not None:
            raise ValueError(
                "beam search does not combine with drafts; give num_beams=1 to draft, or neither a drafter "
                "(draft=False) nor accept= for the base's own beam search"
            )
        if compile:
            logger.warning("compile=%r: beam search is the base's own, and its steps are not compiled", compile)
        options = {"streamer": streamer, "tokenizer": tokenizer, "stop_strings": stop_strings, **kwargs}
        beam_search: Any = front.generate
        search = partial(beam_search, inputs, generation_config, stopping_criteria=stopping_criteria, **options)
        return _run_seeded(search, seed)

    source_ids = prompts if base.config.is_encoder_decoder else None
    run = _Run(decoding, seed, source_ids, streamer, cache)
    if streamer is not None:
        kwargs["streamer"] = streamer
    return call_hf_generate(
        base, run, inputs, front=front, generation_config=generation_config, stopping_criteria=stopping_criteria,
        tokenizer=tokenizer, stop_strings=stop_strings, **kwargs,
    )  # fmt: skip


def call_hf_generate(
    base: PreTrainedModel,
    run: Callable[..., Any],
    inputs: Tensor | None,
    *,
    front: Any = None,
    generation_config: GenerationConfig | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """run(base, ids, …) with the arguments as base.generate() prepares them. ValueError for options drafts refuse.

    front: the peft model around the base whose generate() is called, for adapters of each row."""
    if base.training and any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        raise ValueError(
            "a model that trains with gradient checkpointing keeps no keys to decode with; call eval() first"
        )
    config = effective_config(base, generation_config)
    refuse_options(kwargs, config)
    if strings := config.stop_strings if stop_strings is None else stop_strings:
        stopping_criteria = stop_string_criteria(strings, tokenizer, stopping_criteria)
    if generation_config is not None and generation_config.stop_strings:
        generation_config = without_stop_strings(generation_config)
    if base.generation_config.stop_strings:
        kwargs["stop_strings"] = None  # else transformers reads the model's own, and wants a tokenizer
    caller: Any = front or base
    return caller.generate(
        inputs=inputs,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        custom_generate=run,
        **kwargs,
    )


@dataclass(frozen=True)
class _Run:
    """What base.generate() runs in place of its own loop. source_ids: of an encoder's texts; cache: of earlier text."""

    decoding: Decoding
    seed: int | Sequence[int] | None
    source_ids: Tensor | None
    stream: BaseStreamer | None
    cache: DynamicCache | None

    def __call__(
        self,
        base: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | SpecGenerateOutput | SpecSeq2SeqOutput:
        """The arguments are as base.generate() has prepared them. No further ones have names: transformers would take
        these for arguments of generate()."""
        prompts = _read_prompts(base, input_ids.long(), self.source_ids, self.stream, model_kwargs)
        device, config, do_sample = prompts.ids.device, generation_config, bool(generation_config.do_sample)
        pad_id = int(config._pad_token_tensor.flatten()[0]) if config._pad_token_tensor is not None else 0
        stop = Stopping(
            stopping_criteria, prompts.rows, input_ids.shape[1], prompts.counts, pad_id, device, gives_scores(config)
        )
        sampler = Sampler(
            logits_processor,
            do_sample=do_sample,
            seeds=seeds_for(self.seed, len(prompts.rows)) if do_sample or self.seed is not None else None,
            prompts=prompts.rows,
            lengths=prompts.counts,
            pad_token_id=pad_id,
        )
        text = _Text([list(row) for row in prompts.rows], self.stream, keep_steps=bool(config.return_dict_in_generate))
        self.decoding.warn_past_limits(max(prompts.counts))
        cache = self.cache if config.use_cache else None
        prefix = kept_prefix(base, cache, input_ids, model_kwargs)
        target, plan = self.decoding.prepare(
            device, do_sample, source=prompts.source, decoder_mask=model_kwargs.get("decoder_attention_mask")
        )
        for step in self.decoding.steps(
            target, plan, prompts.ids, prompts.lengths, sampler=sampler, stop=stop, max_new_tokens=stop.limit,
            eos=stop.eos, inputs=replace(prompts.inputs, prefix=prefix),
            keep_scores=bool(config.output_scores or config.output_logits),
        ):  # fmt: skip
            text.add(step)
        text.cut(stop.ends, input_ids.shape[1])
        if self.stream is not None:
            self.stream.end()
        added = [len(row) - input_ids.shape[1] for row in text.rows]
        self.decoding.warn_past_limits(max(n + new for n, new in zip(prompts.counts, added, strict=True)))
        sequences = text.sequences(pad_id, input_ids.device)
        if cache is not None or (config.use_cache and config.return_dict_in_generate):
            cache = keep_text(cache, target, text.rows, input_ids.shape[1], model_kwargs.get("attention_mask"))
        if not config.return_dict_in_generate:
            return sequences
        kind = SpecSeq2SeqOutput if prompts.source else SpecGenerateOutput
        given_cache: dict[str, Any] = {next(name for name in CACHE_NAMES if name in kind.__dataclass_fields__): cache}
        return kind(
            sequences=sequences,  # type: ignore[arg-type]
            scores=stack_by_position(text.scores, 1) if config.output_scores else None,  # type: ignore[arg-type]
            logits=stack_by_position(text.scores, 0) if config.output_logits else None,  # type: ignore[arg-type]
            steps=text.steps,
            lossless=self.decoding.is_lossless(len(prompts.rows)),
            **given_cache,
        )


@dataclass(frozen=True)
class _Prompts:
    """rows: the prompts as Hugging Face has them, padding included. ids (B, T'), lengths (B,): packed left, on the
    device; counts: the lengths on the host. source: what an encoder-decoder has encoded, else None."""

    rows: list[list[int]]
    ids: Tensor
    lengths: Tensor
    counts: list[int]
    inputs: ModelInputs
    source: Source | None


def _read_prompts(
    base: PreTrainedModel,
    input_ids: Tensor,
    source_ids: Tensor | None,
    stream: BaseStreamer | None,
    model_kwargs: Mapping[str, Any],
) -> _Prompts:
    """Prompts input_ids (B, T) and the model's arguments, without padding. ValueError for prompts without tokens."""
    source, mask = None, model_kwargs.get("attention_mask")
    if base.config.is_encoder_decoder:
        rows = None if source_ids is None else unpadded_rows(source_ids, mask, len(input_ids))
        source = Source(model_kwargs["encoder_outputs"][0], mask, rows)
        mask = None  # Hugging Face keeps the padding of a decoder's prompt, and the positions of some models count it
    if input_ids.shape[1] == 0:
        raise ValueError("an empty prompt has nothing to continue; give at least one token (the BOS token, say)")
    if stream is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes one sequence, not a batch of {len(input_ids)}; call generate() row by row")
    warn_of_right_padding(mask)
    warn_of_holes(base, mask)
    ids, lengths = pack_left(input_ids, mask)
    inputs = model_inputs(base, input_ids, mask, left_order(mask), model_kwargs)
    counts = lengths.tolist()
    if min(counts) == 0:
        raise ValueError(f"row {counts.index(0)} of the batch is all padding; each prompt needs at least one token")
    return _Prompts(input_ids.tolist(), ids, lengths, counts, inputs, source)


@dataclass
class _Text:
    """The text collected from the steps of decode().

    rows: each prompt as Hugging Face has it, and the tokens after it; scores: per row and token, where the steps hold
    them; steps: kept if keep_steps, without their scores.
    """

    rows: list[list[int]]
    stream: BaseStreamer | None
    keep_steps: bool
    steps: list[Step] = field(default_factory=list)
    scores: list[list[tuple[Tensor, Tensor]]] = field(init=False)

    def __post_init__(self) -> None:
        self.scores = [[] for _ in self.rows]

    def add(self, step: Step) -> None:
        for row, gained in zip(self.rows, step.tokens, strict=True):
            row += gained
        for row_scores, gained_scores in zip(self.scores, step.scores, strict=False):
            row_scores += gained_scores
        step.scores.clear()
        if self.stream is not None and step.tokens[0]:
            self.stream.put(torch.tensor(step.tokens[0]))
        if self.keep_steps:
            self.steps.append(step)

    def cut(self, ends: Mapping[int, int], columns: int) -> None:
        """Drop what rows wrote past their ends. ends: row → how many of its new tokens count; columns: of the
        prompts."""
        for row, left in ends.items():
            del self.rows[row][columns + left :], self.scores[row][left:]
            for step in self.steps:
                cut_row(step, row, left)
                left -= len(step.tokens[row])

    def sequences(self, pad_id: int, device: torch.device) -> Tensor:
        """(B, longest) ids, padded on the right."""
        longest = max(map(len, self.rows))
        return torch.tensor([row + [pad_id] * (longest - len(row)) for row in self.rows], device=device)


def _run_seeded(run: Callable[[], Any], seed: int | Sequence[int] | None) -> Any:
    """run() with torch's global generators seeded, and restored afterwards. ValueError for a seed of each row."""
    if seed is None:
        return run()
    if not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: beam search draws all rows from one seed; give a single number")
    with torch.random.fork_rng():
        torch.manual_seed(int(seed))
        return run()
