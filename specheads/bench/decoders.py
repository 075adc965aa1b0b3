"""The decoders a race compares: transformers' own generate(), its prompt lookup, our plain loop, and draft heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.decoding.generation.prompt_batches import new_tokens
from specheads.decoding.planner import Plan
from specheads.models.spec_model import SpecModel

REFERENCE = "transformers generate"  # what the others are compared with


def accepted_length(model: SpecModel, batches: Iterable[dict[str, Any]], **options: Any) -> float:
    """Tokens that a step yields, the prefill's left out. options: of generate()."""
    yielded = []
    for batch in batches:
        out: Any = model.generate(**batch, draft="head", return_dict_in_generate=True, **options)
        yielded += [len(row) for step in out.steps[1:] for row in step.tokens if row]
    return sum(yielded) / len(yielded)


def transformers_generate(base: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """base.generate(), greedy. options: prompt_lookup_num_tokens=…, say."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        with torch.no_grad():
            out = cast(Any, base).generate(
                **batch, max_new_tokens=max_new_tokens, do_sample=False, streamer=watch, **options
            )
        return Output(new_tokens(base, batch, out))

    return run


def assisted(base: PreTrainedModel, small: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """transformers' assisted generation, greedy. options: of the small model's generation config, which governs it."""
    run = transformers_generate(base, max_new_tokens, assistant_model=small)

    def configured(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        kept = copy.deepcopy(small.generation_config)
        small.generation_config.update(**options)
        try:
            return run(batch, watch)
        finally:
            small.generation_config = kept

    return configured


def drafted(
    model: SpecModel | PreTrainedModel, max_new_tokens: int, *, draft: bool | Drafter = True, plan: Plan | None = None,
    accept: Acceptance | None = None, **sampling: Any,
) -> Decoder:  # fmt: skip
    """Our loop with the head of `model`, or another drafter; draft=False (or a bare base): one token a step.

    Greedy, unless `sampling` says otherwise in generate()'s words: do_sample=True, temperature=…, seed=…
    """
    base = model.base if isinstance(model, SpecModel) else model
    own = model.head if isinstance(model, SpecModel) else None
    drafter = own if draft is True else (draft or None)
    options = {"do_sample": False, **sampling}

    def run(batch: dict[str, Any], watch: Any) -> Output:
        with torch.no_grad():
            out = generate(
                base, **batch, drafter=drafter, max_new_tokens=max_new_tokens, streamer=watch, tree=plan,
                accept=accept, return_dict_in_generate=True, **options,
            )  # fmt: skip
        assert isinstance(out, SpecGenerateOutput | SpecSeq2SeqOutput) and out.steps is not None
        stepped = [row for step in out.steps[1:] for row in step.tokens if row]
        statistics = out.statistics() | {"rows_stepped": len(stepped), "gained": sum(map(len, stepped))}
        return Output(new_tokens(base, batch, out.sequences), statistics)

    return run
