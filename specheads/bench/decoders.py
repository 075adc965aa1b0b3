"""The decoders that a race compares: transformers' generate(), eager and compiled, its assisted generation and prompt
lookup, and our loop, plain or with any drafter.

A batch is input_ids and attention_mask (B, T), `limits` (each row's most new tokens) if they differ between rows, and
`seeds` of the rows if they are sampled.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from specheads.bench.batches import cut, take_row_options
from specheads.bench.runner import Decoder, Output, Stopwatch, await_turn
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters import Cascade, Drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.many import generate_many
from specheads.decoding.generation.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.decoding.generation.prompt_batches import new_tokens
from specheads.decoding.loop import part_timer
from specheads.decoding.planner import Plan
from specheads.decoding.verify.model_inputs import cache_argument
from specheads.models.spec_model import SpecModel

REFERENCE = "transformers generate"  # what the others are compared with
PARTS = ("prefill", "draft", "verify", "accept", "step", "other")  # of a call; step: a whole compiled step


def transformers_generate(base: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """base.generate(), greedy by default. options: its arguments, such as prompt_lookup_num_tokens=… or do_sample=True.

    The seed of a batch's first row seeds torch's global generator, from which all rows are sampled."""
    arguments: dict[str, Any] = {"do_sample": False, **options}
    if not arguments.get("stop_strings", True):
        del arguments["stop_strings"]  # transformers asks for a tokenizer even if there are none

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        inputs, limits, seeds = take_row_options(batch, max_new_tokens)
        if seeds is not None:
            torch.manual_seed(seeds[0])
        with torch.no_grad():
            # The batch runs until its longest text ends, like any batch that is not refilled.
            out = cast(Any, base).generate(**inputs, max_new_tokens=max(limits), streamer=watch, **arguments)
        return Output(cut(new_tokens(base, inputs, out), limits))

    return run


def transformers_static(
    base: PreTrainedModel, max_new_tokens: int, longest: int, *, backend: str = "inductor", **options: Any
) -> Decoder:
    """base.generate() with a static cache and torch.compile, as a user would compile it by hand: the prefill is eager,
    each step runs in one graph. longest: tokens in the longest prompt; the cache always has room for it, so nothing is
    recompiled. backend: of torch.compile. options: as for transformers_generate."""
    # One graph per batch size. Without dynamic=False, the second size compiles a slower one for all sizes.
    mode = "reduce-overhead" if base.device.type == "cuda" and backend == "inductor" else "default"
    compiling = CompileConfig(mode=mode, dynamic=False, backend=backend)
    compiling._compile_all_devices = True  # type: ignore[assignment]
    caches: dict[int, StaticCache] = {}

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        rows = len(batch["input_ids"])
        if rows not in caches:
            caches[rows] = StaticCache(config=base.config, max_cache_len=longest + max_new_tokens)
        caches[rows].reset()
        arguments = {**options, cache_argument(base): caches[rows], "compile_config": compiling}
        return transformers_generate(base, max_new_tokens, **arguments)(batch, watch)

    return run


def transformers_assisted(
    base: PreTrainedModel, small: PreTrainedModel, max_new_tokens: int, sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Decoder:  # fmt: skip
    """transformers' assisted generation, greedy unless `sampling` says otherwise. options: for the small model's
    generation config, which controls drafting."""
    run = transformers_generate(base, max_new_tokens, assistant_model=small, **(sampling or {}))

    def configured(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        kept = copy.deepcopy(small.generation_config)
        small.generation_config.update(**options)
        try:
            return run(batch, watch)
        finally:
            small.generation_config = kept

    return configured


def specheads_generate(
    model: SpecModel | PreTrainedModel, max_new_tokens: int, *, draft: bool | str | Drafter = True,
    plan: Plan | None = None, accept: Acceptance | None = None, batch_size: int | None = None, **options: Any,
) -> Decoder:  # fmt: skip
    """Our loop with the head of `model` or another drafter; draft=False (or a bare base): one token per step. A string,
    such as "auto", is passed to SpecModel.generate().

    batch_size: number of rows decoded at a time, a finished row being replaced by the next prompt; None: all at once.
    Greedy by default. options: generate()'s arguments, such as do_sample=True, temperature=… or compile=True. A row's
    text depends only on its own seed.
    """
    base = model.base if isinstance(model, SpecModel) else model
    head = model.head if isinstance(model, SpecModel) else None
    options = {"do_sample": False, "tree": plan, "accept": accept, **options}
    named: dict[str, Any] = {"draft": head if draft is True else (draft or None)}
    call: Any = partial(generate, base, **named)
    call_many: Any = partial(generate_many, base, **named)
    if isinstance(draft, str):
        assert isinstance(model, SpecModel)
        call, call_many = partial(model.generate, draft=draft), partial(model.generate_many, draft=draft)

    def whole(batch: dict[str, Any], limit: int, watch: Any, seeds: list[int] | None) -> Output:
        arguments = {**options, "max_new_tokens": limit, "streamer": watch, "seed": seeds}
        out = call(**batch, return_dict_in_generate=True, **arguments)
        assert isinstance(out, SpecGenerateOutput | SpecSeq2SeqOutput) and out.steps is not None
        numbers = range(len(batch["input_ids"]))
        gains = [[len(step.tokens[row]) for step in out.steps if step.tokens[row]] for row in numbers]
        accepted = [[step.accepted[row] for step in out.steps if step.tokens[row]] for row in numbers]
        tokens = new_tokens(base, batch, out.sequences)
        reviews = {}
        if isinstance(draft, Cascade) and len(tokens) == 1:  # the rows of a batch share the passes that it counts
            reviews = {"draft_reviews": list(draft.reviews if gains[0][1:] else [0] * len(draft.drafts))}
        nodes = accepted_nodes(ranks for step in out.steps for ranks in step.ranks)
        return Output(tokens, out.statistics() | counts(gains) | nodes | reviews, gains, accepted=accepted)

    def row_by_row(batch: dict[str, Any], limits: list[int], parts: PartTimer, seeds: list[int] | None) -> Output:
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        prompts = [ids[mask.bool()].tolist() for ids, mask in rows]
        arguments = {**options, "max_new_tokens": limits, "seed": seeds}
        results = call_many(prompts, batch_size=batch_size or len(prompts), **arguments)
        gains = [[len(step.tokens[0]) for step in result.steps] for result in results]
        accepted = [[step.accepted[0] for step in result.steps] for result in results]
        tokens = [result.tokens for result in results]
        nodes = accepted_nodes(step.ranks[0] for result in results for step in result.steps)
        return Output(tokens, {"steps": parts.steps} | counts(gains) | nodes, gains, accepted=accepted)

    def run(batch: dict[str, Any], watch: Any) -> Output:
        inputs, limits, seeds = take_row_options(batch, max_new_tokens)
        parts = PartTimer()
        token = part_timer.set(parts)
        try:
            with torch.no_grad():
                if batch_size is None and len(set(limits)) == 1:
                    output = whole(inputs, limits[0], watch, seeds)
                else:
                    output = row_by_row(inputs, limits, parts, seeds)
        finally:
            part_timer.reset(token)
        parts("other")
        return replace(output, parts=parts.seconds)

    return run


def counts(gains: list[list[int]]) -> dict[str, Any]:
    """The statistics that samples use. gains: per row the tokens gained in each of its steps."""
    later = [gained for row in gains for gained in row[1:]]
    return {"rows_stepped": len(later), "gained": sum(later)}


def accepted_nodes(ranks: Iterable[Sequence[int]]) -> dict[str, Any]:
    """The statistic of that name: how often each node of a tree was accepted. A node is the path of sibling ranks to
    it, such as 0.2 for the third choice below the first. ranks: of the accepted path of each step and row."""
    paths = (".".join(map(str, path[:depth])) for path in ranks for depth in range(1, len(path) + 1))
    return {"accepted_nodes": Counter(paths)}


class PartTimer:
    """Seconds of one call of generate() by part of the loop, and its number of steps. On a GPU this is the host's time:
    the device's work counts for the part in which the host waits for it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        if part == "other":  # each step of the loop begins with it
            self.steps += 1
            if (wait := await_turn.get()) is not None:
                wait()
                self._last = time.perf_counter()
