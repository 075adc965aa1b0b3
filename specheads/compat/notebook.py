"""Functions of a notebook on draft-model speculative decoding with top-k sampling.

Its models were global variables; here they are set once, by `set_models(target, drafter)`, or passed to each call as
keyword arguments. Shapes: T ids, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TopKLogitsWarper

from specheads.compat.plain import checked_model, checked_row, generate_raw
from specheads.compat.processors import top_k_of, whole
from specheads.decoding.drafters import DraftModel
from specheads.decoding.planner import SampledTree, chain

_MODELS: dict[str, PreTrainedModel] = {}


def set_models(target: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Set the models that `generate_draft` and `speculative_decode` use by default."""
    _MODELS.update(target=checked_model("target", target), drafter=checked_model("drafter", drafter))


def get_topk_probas(logits: Tensor, k: int) -> Tensor:
    """logits (…, V) → probs (…, V) of the k likeliest tokens, 0 for all others."""
    return top_k_of(logits, whole("k", k)).softmax(-1)


def generate_draft(
    ids: Tensor, max_new_tokens: int = 5, k: int = 1, model: PreTrainedModel | None = None
) -> tuple[Tensor, Tensor]:
    """ids (1, T) followed by n new tokens → (1, T + n), and the probs (1, n, V) that these were drawn from.

    n is max_new_tokens, or fewer if the model ends its text. k: sample from this many likeliest tokens (1: greedy).
    model: the drafter of `set_models` unless given.
    """
    model = _given("model", model, "drafter")
    out = generate_raw(
        model, checked_row("ids", ids), whole("max_new_tokens", max_new_tokens),
        processors=[TopKLogitsWarper(whole("k", k))], do_sample=k > 1, output_logits=True,
    )  # fmt: skip
    return out.sequences, get_topk_probas(torch.stack(out.logits, 1), k)


def speculative_decode(
    ids: Tensor, max_tokens: int = 250, gamma: int = 5, k: int = 1, *, target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """ids (1, T) followed by at most max_tokens new ones, and how many of these were drafted.

    Each step drafts gamma tokens and adds one of the target's own, after a rejection or a fully accepted draft; that
    one and the first token are not counted as drafted. Each token has the target's distribution over its k likeliest
    (1: greedy), and its end token ends the text. The target may be spread over devices, or offloaded (`device_map`).
    target, drafter: those of `set_models` unless given.
    """
    if isinstance(max_tokens, PreTrainedModel):
        raise TypeError("models are keywords: speculative_decode(ids, max_tokens, target=..., drafter=...)")
    max_tokens, gamma, k = whole("max_tokens", max_tokens), whole("gamma", gamma), whole("k", k)
    target, drafter = _given("target", target, "target"), _given("drafter", drafter, "drafter")
    out = generate_raw(
        target, checked_row("ids", ids), max_tokens, processors=[TopKLogitsWarper(k)], do_sample=k > 1,
        draft=DraftModel(drafter), tree=SampledTree((1,) * gamma) if k > 1 else chain(gamma),
    )  # fmt: skip
    return out.sequences, sum(step.accepted[0] for step in out.steps)


def _given(name: str, model: Any, role: str) -> PreTrainedModel:
    """The model given as `name`, else the one from set_models. ValueError if there is neither."""
    if model is None and role not in _MODELS:
        raise ValueError(f"there is no {role} yet: call set_models(target, drafter) once, or give {name}=")
    return _MODELS[role] if model is None else checked_model(name, model)
