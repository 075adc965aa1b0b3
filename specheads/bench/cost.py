"""The cost of a cascade's reviews, and the standardised walltime improvement (SWI) computed from it.

C = Σ reviews · cost over the target and its drafts, n-grams being free; SWI = tokens · the target's cost / C, the
speed-up over one token per pass if only passes took time. Cascade Speculative Drafting, arXiv:2312.11462.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.seq2seq import Source, make_target

# The published costs; keys are parts of model names. model_parameters: millions (the published 70000 for 7b, and for
# every other llama, is a slip); previous_work: share of T5-XXL's time.
COST_MODELS: dict[str, dict[str, float]] = {
    "model_parameters": {
        "xxl": 11300, "xl": 3000, "large": 770, "base": 220, "small": 60,
        "llama-68m": 68, "llama-160m": 160, "7b": 7000,
    },
    "previous_work": {"xxl": 1, "large": 0.11, "base": 0.04, "small": 0.02},
}  # fmt: skip


def published(cost_model: str, names: Sequence[str | None]) -> list[float]:
    """The cost of one pass of each model, looked up by name ("google/flan-t5-xxl"); None, an n-gram, is free.

    ValueError for an unknown cost model, and for a name that matches none or several of its entries.
    """
    if cost_model not in COST_MODELS:
        raise ValueError(f"cost_model={cost_model!r} is none of {', '.join(COST_MODELS)}; measured() times models here")
    return [0.0 if name is None else _cost(cost_model, name) for name in names]


def _cost(cost_model: str, name: str) -> float:
    table, parts = COST_MODELS[cost_model], f"-{re.sub('[/_. ]', '-', name.lower())}-"
    matches = [key for key in table if f"-{key}-" in parts]
    if len(matches) != 1:
        problem = f"knows no model {name!r}" if not matches else f"finds {' and '.join(matches)} in the name {name!r}"
        raise ValueError(
            f"the cost model {cost_model!r} {problem}; it goes by {', '.join(table)}. measured() times any model"
        )
    return table[matches[0]]


def measured(
    models: Sequence[PreTrainedModel | None], *, num_tokens: int = 1, length: int = 64, repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:  # fmt: skip
    """Seconds of one pass of each model over `num_tokens` tokens after `length` cached ones: the median of `repeats`,
    in each of which the models take turns. None, an n-gram, is free. For an encoder-decoder: a pass of the decoder,
    with as many encoder tokens, which are encoded once."""
    for name, value in (("num_tokens", num_tokens), ("length", length), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    passes = [None if model is None else _one_pass(model, num_tokens, length, clock) for model in models]
    for run in passes:
        if run is not None:
            run()  # warms up
    taken: list[list[float]] = [[] for _ in models]
    for _ in range(repeats):
        for times, run in zip(taken, passes, strict=True):
            times.append(0.0 if run is None else run())
    return [median(times) for times in taken]


def _one_pass(model: PreTrainedModel, num_tokens: int, length: int, clock: Callable[[], float]) -> Callable[[], float]:
    weight: Any = model.get_input_embeddings().weight
    ids = torch.ones(1, length, dtype=torch.long, device=weight.device)
    source = Source.encode(model, ids.tolist()) if model.config.is_encoder_decoder else None
    target = make_target(model.eval(), scratch=num_tokens, source=source)
    target.prefill(ids, torch.full_like(ids[:, 0], length), room=num_tokens)
    tree = DraftTree.chains(ids[:, 0], [[1] * (num_tokens - 1)])

    def run() -> float:
        began = clock()
        # Reading a number makes the host wait for the device.
        float(target.verify(tree).logits[0, 0, 0])
        return clock() - began

    return run


def total_cost(reviews: Sequence[int], costs: Sequence[float]) -> float:
    """C, the total cost. reviews: number by model; costs: of one review, by model."""
    if len(reviews) != len(costs):
        raise ValueError(f"{len(reviews)} counts of reviews but {len(costs)} costs; give one of each a model")
    return sum(count * cost for count, cost in zip(reviews, costs, strict=True))


def walltime_improvement(num_tokens: int, reviews: Sequence[int], costs: Sequence[float]) -> float:
    """SWI of generating num_tokens. reviews and costs start with the target's; `Cascade.reviews` has the others."""
    cost = total_cost(reviews, costs)
    if not cost:
        raise ValueError(f"reviews {list(reviews)} at costs {list(costs)} come to nothing, so there is no SWI")
    return num_tokens * costs[0] / cost
