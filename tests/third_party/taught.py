"""Heads for the scripts here that the shipped ones cannot stand for: taught on what the shipped base writes itself.

A minute on a CPU each, for the prompts that are decoded afterwards: they accept something, and that is all they are
for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specheads import SpecModel, convert

SLOTS, MASK = 5, 0  # of a block; the token that stands in its later slots
DFLASH = {
    "causal": False, "mask_token_id": MASK, "block_size": SLOTS, "draft_depth": SLOTS - 1, "markov_rank": 0,
    "confidence": False, "sample_from_anchor": False, "anchors": 24,
}  # fmt: skip
DSPARK = {**DFLASH, "draft_depth": SLOTS, "markov_rank": 32, "sample_from_anchor": True}


def taught(model: Any, prompts: list[list[int]], steps: int, rate: float, new_tokens: int = 64) -> Any:
    """The head after `steps` on the base's greedy continuations of the prompts, cut to one length."""
    length = min(map(len, prompts))
    text = model.base.generate(
        torch.tensor([prompt[:length] for prompt in prompts]),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.head.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def published(shipped: SpecModel, prompts: list[list[int]]) -> Any:
    """The shipped EAGLE-3 head without norm_before_residual, as EAGLE's own repository and OpenVINO GenAI have it."""
    config = replace(shipped.head.config, norm_before_residual=False)
    model = convert(shipped.base, config, dtype=torch.float32)
    model.head.load_state_dict(shipped.head.state_dict())
    return taught(model, prompts, 60, 2e-3)


def blocks(base: Any, prompts: list[list[int]], options: dict[str, Any]) -> Any:
    """A parallel head of one layer: DFLASH or DSPARK."""
    torch.manual_seed(0)
    return taught(convert(base, "parallel", dtype=torch.float32, **options), prompts, 60, 4e-3)
