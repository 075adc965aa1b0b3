"""Heads that have learnt a few texts of their tiny base, so that decoding accepts some of their drafts."""

import copy
import functools

import torch

from specheads.models.convert import convert
from tests.reference.slow_heads import DEFAULTS
from tests.support.tiny_models import tiny_llama

PROMPTS = [[5, 6, 7, 8], [50, 9], [33, 34, 35, 36, 37, 38, 39]]


def learnt(kind, **options):
    """A head that is often right on what its base writes after PROMPTS: a copy, which a test may change."""
    return copy.deepcopy(trained(kind, **options))


@functools.cache
def trained(kind, **options):
    base = tiny_llama(num_hidden_layers=2)
    with torch.no_grad():  # a base that repeats itself less
        for parameter in base.parameters():
            parameter.mul_(1.5) if parameter.ndim > 1 else None
    texts = [base.generate(torch.tensor([p]), max_new_tokens=40, do_sample=False)[0] for p in PROMPTS]
    narrow = {"draft_vocab_size": 97} if kind == "eagle3" else {}
    model = convert(base, kind, **{**DEFAULTS[kind], **narrow, **options})
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    model.train()
    for step in range(60):
        ids = texts[step % 3].unsqueeze(0)
        optimizer.zero_grad()
        model(ids, loss_mask=torch.ones_like(ids)).loss.backward()
        optimizer.step()
    return model
