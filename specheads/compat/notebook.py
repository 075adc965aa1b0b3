"""The notebook of draft-model speculative decoding with top-k sampling.

Shapes: γ drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, TopKLogitsWarper

from specheads.compat.plain import accepted_and_drafted, generate_plainly
from specheads.drafters import DraftModel
from specheads.planner import SampledTree, chain
from specheads.planner.plan import positive


def get_topk_probas(logits: Tensor, k: int) -> Tensor:
    """logits (…, V) → the law (…, V) of its k likeliest tokens; the others have probability 0."""
    flat = logits.reshape(-1, logits.shape[-1])
    none = torch.empty(len(flat), 0, dtype=torch.long, device=logits.device)
    return TopKLogitsWarper(k)(none, flat).softmax(-1).view_as(logits)


def generate_draft(ids: Tensor, drafter: PreTrainedModel, gamma: int, k: int) -> tuple[Tensor, Tensor]:
    """ids (1, T) → with at most γ drafted tokens behind them (1, T + γ), and the laws (1, γ, V) they were drawn from.

    Fewer where the draft model ends its text.
    """
    top_k = [TopKLogitsWarper(k)]
    out = generate_plainly(drafter, ids, gamma, processors=top_k, do_sample=k > 1, output_logits=True)
    return out.sequences, get_topk_probas(torch.stack(out.logits, 1), k)


def speculative_decode(
    ids: Tensor,
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    max_tokens: int,
    gamma: int = 5,
    k: int = 1,
) -> tuple[Tensor, int]:
    """ids (1, T) → with at most max_tokens new ones behind them, and how many of these were drafted.

    Each token has the target's law over its k likeliest (k = 1: greedy); its end token ends the text. The target may
    be spread over devices, or offloaded (`device_map`).
    """
    positive("gamma", gamma)
    positive("k", k)
    out = generate_plainly(
        target, ids, max_tokens, processors=[TopKLogitsWarper(k)], do_sample=k > 1, drafter=DraftModel(drafter),
        tree=SampledTree((1,) * gamma) if k > 1 else chain(gamma),
    )  # fmt: skip
    return out.sequences, accepted_and_drafted(out.steps, max_tokens)[0]
