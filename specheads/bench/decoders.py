"""The decoders a race compares: transformers' own generate(), eager and compiled, its assisted generation and prompt
lookup, our plain loop, and whatever drafts in it."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.decoding.generation.prompt_batches import new_tokens
from specheads.decoding.loop import part_timer
from specheads.decoding.planner import Plan
from specheads.models.spec_model import SpecModel

REFERENCE = "transformers generate"  # what the others are compared with
PARTS = ("prefill", "draft", "verify", "accept", "step", "other")  # of a call; step: of a whole compiled one


def accepted_length(model: SpecModel, batches: Iterable[dict[str, Any]], **options: Any) -> float:
    """Tokens that a step yields, the prefill's left out. options: of generate()."""
    yielded = []
    for batch in batches:
        out: Any = model.generate(**batch, draft="head", return_dict_in_generate=True, **options)
        yielded += [len(row) for step in out.steps[1:] for row in step.tokens if row]
    return sum(yielded) / len(yielded)


def transformers_generate(base: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """base.generate(), greedy unless options say otherwise: prompt_lookup_num_tokens=…, do_sample=True, say.

    seed, among the options: of torch's global generator, for each batch anew."""
    given: dict[str, Any] = {"do_sample": False, **options}
    seed: int | None = given.pop("seed", None)

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        if seed is not None:
            torch.manual_seed(seed)
        with torch.no_grad():
            out = cast(Any, base).generate(**batch, max_new_tokens=max_new_tokens, streamer=watch, **given)
        return Output(new_tokens(base, batch, out))

    return run


def transformers_static(
    base: PreTrainedModel, max_new_tokens: int, longest: int, *, backend: str = "inductor", **options: Any
) -> Decoder:
    """base.generate() over a static cache with torch.compile, as a user compiles it by hand: the prefill is eager, each
    step runs in one graph. longest: most tokens of a prompt; the cache has room for it whatever the prompt, so that
    nothing is compiled again. backend: of torch.compile. options: as above."""
    # A graph for each batch size; without dynamic=False the second makes a slower one for any.
    mode = "reduce-overhead" if base.device.type == "cuda" and backend == "inductor" else "default"
    compiling = CompileConfig(mode=mode, dynamic=False, backend=backend)
    compiling._compile_all_devices = True  # type: ignore[assignment]
    caches: dict[int, StaticCache] = {}

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        rows = len(batch["input_ids"])
        if rows not in caches:
            caches[rows] = StaticCache(config=base.config, max_cache_len=longest + max_new_tokens)
        caches[rows].reset()
        given = {**options, "past_key_values": caches[rows], "compile_config": compiling}
        return transformers_generate(base, max_new_tokens, **given)(batch, watch)

    return run


def assisted(
    base: PreTrainedModel, small: PreTrainedModel, max_new_tokens: int, sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Decoder:  # fmt: skip
    """transformers' assisted generation, greedy unless `sampling` says otherwise. options: of the small model's
    generation config, which governs it."""
    run = transformers_generate(base, max_new_tokens, assistant_model=small, **(sampling or {}))

    def configured(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        kept = copy.deepcopy(small.generation_config)
        small.generation_config.update(**options)
        try:
            return run(batch, watch)
        finally:
            small.generation_config = kept

    return configured


def drafted(
    model: SpecModel | PreTrainedModel, max_new_tokens: int, *, draft: bool | str | Drafter = True,
    plan: Plan | None = None, accept: Acceptance | None = None, **options: Any,
) -> Decoder:  # fmt: skip
    """Our loop with the head of `model`, or another drafter; draft=False (or a bare base): one token a step. A text,
    "auto", is for the generate() of a SpecModel.

    Greedy, unless the options say otherwise in generate()'s words: do_sample=True, temperature=…, seed=…, compile=True
    """
    base = model.base if isinstance(model, SpecModel) else model
    own = model.head if isinstance(model, SpecModel) else None
    options = {"do_sample": False, "tree": plan, "accept": accept, **options}
    call: Any = partial(generate, base, drafter=own if draft is True else (draft or None))
    if isinstance(draft, str):
        assert isinstance(model, SpecModel)
        call = partial(model.generate, draft=draft)

    def run(batch: dict[str, Any], watch: Any) -> Output:
        parts = PartTimer()
        token = part_timer.set(parts)
        try:
            with torch.no_grad():
                given = {"max_new_tokens": max_new_tokens, "streamer": watch, "return_dict_in_generate": True}
                out = call(**batch, **given, **options)
        finally:
            part_timer.reset(token)
        parts("other")
        assert isinstance(out, SpecGenerateOutput | SpecSeq2SeqOutput) and out.steps is not None
        stepped = [row for step in out.steps[1:] for row in step.tokens if row]
        statistics = out.statistics() | {"rows_stepped": len(stepped), "gained": sum(map(len, stepped))}
        gains = [[len(row) for row in rows if row] for rows in zip(*(step.tokens for step in out.steps), strict=True)]
        return Output(new_tokens(base, batch, out.sequences), statistics, gains, parts.seconds)

    return run


class PartTimer:
    """Seconds of one call of generate(), by part of the loop. On a GPU they are the host's: what the device computes
    counts where the host waits for it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


def can_compile() -> bool:
    """Does generate() here take compile=True?"""
    return "compile" in inspect.signature(generate).parameters


def can_choose() -> bool:
    """Does a SpecModel's generate() here take draft="auto"?"""
    return inspect.signature(SpecModel.generate).parameters["draft"].default == "auto"
