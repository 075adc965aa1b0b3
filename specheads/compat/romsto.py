"""https://github.com/romsto/Speculative-Decoding: its generation functions, of lists of ids."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.accept import Acceptance, Exact, Unadjusted
from specheads.compat.plain import accepted_and_drafted, generate_plainly, room_for
from specheads.compat.processors import GreedyProcessor, Processor
from specheads.console import depth_style, make_console, printable, write
from specheads.decode import Step
from specheads.drafters import DraftModel, NGram, NGramStorage
from specheads.drafters.base import Drafter
from specheads.planner import Plan, SampledTree, chain
from specheads.planner.plan import positive


def autoregressive_generate(
    inputs: list[int],
    model: PreTrainedModel,
    max_gen_len: int = 40,
    logits_processor: Processor | None = None,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
) -> list[int]:
    """The new ids, up to and with the first of eos_tokens_id. logits_processor: greedy unless given.

    use_cache and debug are taken and not read: there is always a cache, and nothing is drafted that could be shown.
    """
    return _generate(inputs, model, max_gen_len, logits_processor, eos_tokens_id, pad_token_id)[0]


def speculative_generate(
    inputs: list[int],
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: Processor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
) -> tuple[list[int], float]:
    """The new ids, and the acceptance rate α: of the tokens drafted, how many stand in the text; 0 where none were.

    skip_sample_adjustment: the rule `Unadjusted`, which is not lossless. debug: print each step's tokens, accepted
    drafts coloured; as ids without a tokenizer. use_cache is taken and not read: there is always a cache. first_target
    too: the prefill always gives the first token, which has the same law and costs one forward less than drafting it.
    """
    positive("gamma", gamma)
    sampled = _known(logits_processor).do_sample
    return _generate(
        inputs, target, max_gen_len, logits_processor, eos_tokens_id, pad_token_id, drafter=DraftModel(drafter),
        tree=SampledTree((1,) * gamma) if sampled else chain(gamma),
        accept=Unadjusted() if skip_sample_adjustment else Exact(), debug=debug, tokenizer=tokenizer,
    )  # fmt: skip


def ngram_assisted_speculative_generate(
    inputs: list[int],
    ngramstorage: NGramStorage,
    target: PreTrainedModel,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: Processor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
) -> tuple[list[int], float]:
    """As `speculative_generate`, drafted from a storage, which learns this text and keeps what it knew.

    filler_top_k, stop_if_unknown: see `NGram`. The target's law also where the text is sampled.
    """
    drafter = NGram(
        gamma, storage=ngramstorage, filler_top_k=filler_top_k, stop_if_unknown=stop_if_unknown, reset_between=False
    )
    return _generate(
        inputs, target, max_gen_len, logits_processor, eos_tokens_id, pad_token_id, drafter=drafter, debug=debug,
        tokenizer=tokenizer,
    )  # fmt: skip


# The same functions serve both kinds of models; of an encoder-decoder they return the decoder's start token in front,
# as theirs do.
autoregressive_generate_encoder_decoder = autoregressive_generate
speculative_generate_encoder_decoder = speculative_generate


def _generate(
    inputs: list[int],
    target: PreTrainedModel,
    max_gen_len: int,
    processor: Processor | None,
    eos_tokens_id: int | list[int],
    pad_token_id: int,
    *,
    drafter: Drafter | None = None,
    tree: Plan | None = None,
    accept: Acceptance | None = None,
    debug: bool = False,
    tokenizer: Any = None,
) -> tuple[list[int], float]:
    processor = _known(processor)
    limit = room_for(target, len(inputs), max_gen_len)
    out = generate_plainly(
        target, torch.tensor([inputs]), limit, processors=processor, do_sample=processor.do_sample, drafter=drafter,
        tree=tree, accept=accept, eos_token_id=eos_tokens_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    if debug:
        _show(out.steps, tokenizer)
    accepted, drafted = accepted_and_drafted(out.steps, limit)
    ids = out.sequences[0].tolist()
    return ids if target.config.is_encoder_decoder else ids[len(inputs) :], accepted / drafted if drafted else 0.0


def _known(processor: Processor | None) -> Processor:
    if processor is not None and not isinstance(processor, Processor):
        raise TypeError(f"logits_processor={processor!r} must be one of specheads.compat's, NucleusProcessor(...) say")
    return GreedyProcessor() if processor is None else processor


def _show(steps: list[Step], tokenizer: Any) -> None:
    """A line a step: its tokens, the accepted drafts in green."""
    console = make_console()
    for number, step in enumerate(steps):
        tokens, accepted = step.tokens[0], step.accepted[0]
        write(console, f"step {number}: {accepted} of {step.drafted[0]} drafts accepted:")
        for place, token in enumerate(tokens):
            text = str(token) if tokenizer is None else repr(tokenizer.decode([token]))
            write(console, f" {printable(text)}", depth_style(int(place < accepted)))
        write(console, "\n")
