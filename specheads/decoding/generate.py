"""generate(): Hugging Face's front door onto decode(), through `custom_generate`, so that logits processors, stopping
criteria, streamers and GenerationConfig mean what they mean there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput
from transformers.utils import logging as hf_logging

from specheads.decoding.acceptance import Acceptance, Fuzzy
from specheads.decoding.acceptance.named import as_rule
from specheads.decoding.context_limits import warn_past_limits
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.drafters.named import either
from specheads.decoding.loop import decode
from specheads.decoding.outputs import SpecGenerateOutput, SpecSeq2SeqOutput, by_position
from specheads.decoding.planner import Plan, as_plan
from specheads.decoding.sampler import Sampler
from specheads.decoding.target.causal import unwrapped
from specheads.decoding.target.model_inputs import model_inputs
from specheads.decoding.target.seq2seq import Source, refuse_branching, verifier
from specheads.options import shown

logger = hf_logging.get_logger(__name__)


@dataclass
class _Stopping:
    """Stopping criteria, asked after each token of each row on its own (criteria look at the last token only)."""

    criteria: StoppingCriteriaList
    prompts: list[list[int]]  # each row as HF has it, padding included
    columns: int
    lengths: list[int]
    device: torch.device
    eos: set[int] = field(default_factory=set)
    limit: int = 0
    others: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = []
        for criterion in self.criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.eos |= set(criterion.eos_token_id.tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                limits.append(criterion.max_length)
            else:
                self.others.append(criterion)
        if not limits:
            raise ValueError("generation has no length limit; give max_new_tokens or max_length")
        self.limit = max(1, min(limits) - self.columns)

    def __call__(self, row: int, ids: list[int], count: int) -> int:
        generated = ids[self.lengths[row] :]
        for kept in range(1, count + 1):
            until = len(generated) - count + kept
            if generated[until - 1] in self.eos or until >= self.limit or self._others_stop(row, generated[:until]):
                return kept
        return -1

    def _others_stop(self, row: int, generated: list[int]) -> bool:
        if not self.others:
            return False
        ids = torch.tensor([self.prompts[row] + generated], device=self.device)
        return any(bool(criterion(ids, None).all()) for criterion in self.others)


def generate(
    base: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    draft: Drafter | str | bool | None = None,
    drafter: Drafter | str | None = None,
    tree: Plan | str | None = None,
    accept: Acceptance | str | None = None,
    seed: int | None = None,
    output_divergences: bool = False,
    generation_config: GenerationConfig | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Tensor | ModelOutput:
    """`base.generate(...)` with draft trees, for any Hugging Face language model: its arguments, and its text.

    draft: what drafts: a drafter (a `DraftModel`, a head …), "lookup", "ngram" or "maxgram"; None or False: plain
    decoding through the same loop; drafter: another name of it. tree: the plan of the trees, or its text, "chain:3" say
    (default: the drafter's; for encoder-decoders a chain). accept: the rule, or its text, "fuzzy:js:0.2" say (default:
    `Exact`, lossless). seed: of the sampling. output_divergences: for a `Fuzzy` rule, keep D at every drafted position
    in the steps (see `decode.Step`); it takes return_dict_in_generate=True. Returns ids, or a `SpecGenerateOutput`
    (`SpecSeq2SeqOutput`) for return_dict_in_generate=True; with num_beams > 1, for which nothing may draft, what the
    base's own beam search
    returns.

    inputs: ids (B, T). Arguments of the model (pixel_values, position_ids, token_type_ids …) are served as generate()
    serves them, or refused by name. A prompt that is padded on the right continues after its own last token, as if it
    were padded on the left, which a line in the log says. Logits processors see each node's own prefix, with the
    caller's padding; one that keeps state from call to call stops the drafting, but for xgrammar's, which is followed.
    """
    base = unwrapped(base)
    drafts = either(draft, drafter)
    plan, rule = as_plan(tree, drafts), as_rule(accept)
    if drafts is None and plan is not None:
        raise ValueError("tree= says what to draft, but nothing drafts (no draft=); give one of the two")
    if output_divergences:
        config = generation_config or base.generation_config
        _check_divergences(rule, kwargs.get("return_dict_in_generate", config.return_dict_in_generate))
    given = inputs if inputs is not None else kwargs.get("input_ids")
    _refuse_text(given)
    if not base.config.is_encoder_decoder:
        _check_ids(base, given, images=kwargs.get("pixel_values") is not None)
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate", "inputs_embeds", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(f"generate() with draft trees takes no {name}=; call the base's own generate() for that")
    default = generation_config or base.generation_config
    if (kwargs.get("num_beams") or default.num_beams or 1) > 1:
        if drafts is not None or accept is not None:
            raise ValueError(
                "beam search does not combine with drafts; give num_beams=1 to draft, or neither a drafter "
                "(draft=False) nor accept= for the base's own beam search"
            )
        own: Any = base.generate
        options = {"streamer": streamer, "tokenizer": tokenizer, "stop_strings": stop_strings, **kwargs}
        return _seeded(lambda: own(inputs, generation_config, stopping_criteria=stopping_criteria, **options), seed)
    for name in ("penalty_alpha", "dola_layers", "use_mtp"):  # other ways of decoding, which a loop of ours would skip
        if value := kwargs.get(name, getattr(default, name, None)):
            raise ValueError(f"{name}={value!r} does not combine with drafts; call the base's own generate() for it")
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name, getattr(default, name, False)):
            raise ValueError(f"{name}=True is not kept by tree decoding; call the base's own generate() for it")
    stop_strings = stop_strings or default.stop_strings
    if stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs tokenizer=, to know which text the tokens spell")
        # generate() wants the tokenizer itself for this but does not pass it on to a custom loop.
        if default.stop_strings:
            generation_config = copy.deepcopy(default)
            generation_config.stop_strings = None
        own = StopStringCriteria(tokenizer, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings))
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), own])
    if streamer is not None:
        kwargs["streamer"] = streamer
    source_ids = given if base.config.is_encoder_decoder else None
    return base.generate(  # type: ignore[operator]
        inputs,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        custom_generate=partial(
            _run,
            drafter=drafts,
            plan=plan,
            accept=rule,
            seed=seed,
            source_ids=source_ids,
            stream=streamer,
            divergences=output_divergences,
        ),
        **kwargs,
    )


def _refuse_text(inputs: Any) -> None:
    """TypeError for a prompt that is text, of which generate() takes the ids."""
    if isinstance(inputs, str) or (isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], str)):
        raise TypeError(
            f"the prompt {shown(inputs)} is text; give its ids: generate(..., **tokenizer(text, return_tensors='pt'))"
        )


def _check_divergences(accept: Any, returns_dict: Any) -> None:
    """ValueError where output_divergences=True would give nothing."""
    if not isinstance(accept, Fuzzy):
        raise ValueError(f"output_divergences=True is for accept=Fuzzy(...), which measures one, not for {accept!r}")
    if not returns_dict:
        raise ValueError("output_divergences=True comes with the steps; give return_dict_in_generate=True too")


def _check_ids(base: PreTrainedModel, ids: Any, *, images: bool) -> None:
    """TypeError or ValueError for prompts that are no ids (B, T) of the base's vocabulary. images: some models put
    their places at an id beyond it."""
    if ids is None:  # then Hugging Face begins with the BOS token
        return
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"the prompts must be a tensor of ids (B, T), not {type(ids).__name__}; give **tokenizer(text, "
            "return_tensors='pt')"
        )
    if ids.dim() != 2 or ids.is_floating_point():
        hint = "; for one prompt give ids.unsqueeze(0)" if ids.dim() == 1 else ""
        raise ValueError(f"the prompts must be ids (B, T), whole numbers, not {tuple(ids.shape)} of {ids.dtype}{hint}")
    if not ids.numel():
        raise ValueError(
            f"an empty prompt has nothing to continue: {tuple(ids.shape)}; give at least one token a row (the BOS "
            "token, say)"
        )
    weight: Any = base.get_input_embeddings().weight
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or (most >= len(weight) > 0 and not images):  # a sharded matrix may be empty here
        raise ValueError(
            f"the prompts hold id {least if least < 0 else most}, and the model has embeddings for 0 to "
            f"{len(weight) - 1}; is the tokenizer that of another model?"
        )


def _run(
    base: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None,
    plan: Plan | None,
    accept: Acceptance,
    seed: int | None,
    source_ids: Tensor | None,
    stream: BaseStreamer | None,
    divergences: bool,
    **model_kwargs: Any,
) -> Tensor | SpecGenerateOutput | SpecSeq2SeqOutput:
    do_sample = bool(generation_config.do_sample)
    source, mask = None, model_kwargs.get("attention_mask")
    if encoder_decoder := bool(base.config.is_encoder_decoder):
        source = Source(model_kwargs["encoder_outputs"][0], mask, _unpadded(source_ids, mask, len(input_ids)))
        # HF leaves the padding of a decoder's prompt where it stands, and the positions of some models count it.
        mask = None
    columns = input_ids.shape[1]
    if columns == 0:
        raise ValueError("an empty prompt has nothing to continue; give at least one token (the BOS token, say)")
    if stream is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes one sequence, not a batch of {len(input_ids)}; call generate() row by row")
    warn_of_right_padding(mask)
    ids, lengths = pack_left(input_ids, mask)
    inputs = model_inputs(base, input_ids, mask, left_order(mask), model_kwargs)
    counts = lengths.tolist()
    if min(counts) == 0:
        raise ValueError(f"row {counts.index(0)} of the batch is all padding; each prompt needs at least one token")
    if drafter is not None and plan is None:
        plan = drafter.default_plan(ids.device, do_sample)
    if drafter is None:
        plan = None
    if plan is not None and encoder_decoder:
        refuse_branching(base, plan)
    pad = generation_config._pad_token_tensor
    pad_id = int(pad) if pad is not None else 0
    stop = _Stopping(stopping_criteria, input_ids.tolist(), columns, counts, ids.device)
    sampler = Sampler(
        logits_processor,
        do_sample=do_sample,
        generator=_generator(seed, ids.device) if do_sample or seed is not None else None,
        prompts=input_ids.tolist(),
        lengths=counts,
        pad_token_id=pad_id,
    )
    wants_scores = bool(generation_config.output_scores or generation_config.output_logits)
    wants_dict = bool(generation_config.return_dict_in_generate)
    target = verifier(
        base, drafter.layers if drafter else (), scratch=plan.num_nodes if plan else 1, source=source,
        decoder_mask=model_kwargs.get("decoder_attention_mask"),
    )  # fmt: skip
    steps, rows = [], [list(row) for row in input_ids.tolist()]
    trained_length = None if drafter is None else drafter.trained_length
    warn_past_limits(base, trained_length, max(counts))
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rows]
    for step in decode(
        target, drafter, ids, lengths, plan=plan, sampler=sampler, accept=accept, stop=stop,
        max_new_tokens=stop.limit, inputs=inputs, eos=stop.eos, keep_scores=wants_scores,
        keep_divergences=divergences,
    ):  # fmt: skip
        for row, gained in zip(rows, step.tokens, strict=True):
            row += gained
        for row_scores, gained_scores in zip(kept, step.scores, strict=False):
            row_scores += gained_scores
        step.scores.clear()
        if stream is not None and step.tokens[0]:
            stream.put(torch.tensor(step.tokens[0]))
        if wants_dict:
            steps.append(step)
    if stream is not None:
        stream.end()
    warn_past_limits(base, trained_length, max(len(row) - columns + n for row, n in zip(rows, counts, strict=True)))
    longest = max(map(len, rows))
    sequences = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows], device=input_ids.device)
    if not wants_dict:
        return sequences
    raw, processed = (by_position(kept, part) if wants_scores else None for part in (0, 1))
    return (SpecSeq2SeqOutput if encoder_decoder else SpecGenerateOutput)(
        sequences=sequences,  # type: ignore[arg-type]
        scores=processed if generation_config.output_scores else None,  # type: ignore[arg-type]
        logits=raw if generation_config.output_logits else None,  # type: ignore[arg-type]
        steps=steps,
        lossless=accept.lossless,
    )


def warn_of_right_padding(mask: Tensor | None) -> None:
    """One line in the log where a row is padded on the right, of which generate() makes something else."""
    if mask is not None and not bool(mask[:, -1].all()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        logger.warning(
            "row %d is padded on the right: its text continues after its own last token, as if padded on the left "
            "(transformers' generate() continues after the padding); set padding_side='left' in the tokenizer", row,
        )  # fmt: skip


def pack_left(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids (B, T) under mask (B, T) → the rows without padding, as wide as the longest, and their lengths (B,)."""
    order = left_order(mask)
    if mask is None or order is None:
        return ids, torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
    return ids.gather(1, order), mask.long().sum(1)


def left_order(mask: Tensor | None) -> Tensor | None:
    """mask (B, T) → the columns of each row's own tokens, packed left (B, longest); None where no column is padding."""
    if mask is None or bool(mask.all()):
        return None
    order = (mask == 0).to(torch.int8).argsort(dim=1, stable=True)
    return order[:, : int(mask.long().sum(1).max())]


def _unpadded(ids: Tensor | None, mask: Tensor | None, num_rows: int) -> list[list[int]] | None:
    """Source ids (B, S) → of each of num_rows = B · n rows to generate (n a source) its source's, without padding."""
    if ids is None:
        return None
    ids = ids.repeat_interleave(num_rows // len(ids), 0)
    packed, lengths = pack_left(ids, mask)
    return [row[:length] for row, length in zip(packed.tolist(), lengths.tolist(), strict=True)]


def _seeded(run: Callable[[], Any], seed: int | None) -> Any:
    """run() under torch's global generators seeded, which then are as before."""
    if seed is None:
        return run()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return run()


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    """Seeded as asked, else from torch's global generator, so that torch.manual_seed governs generate() too."""
    generator = torch.Generator(device=device)
    return generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
