"""Cascades: they draft what the published algorithm drafts, at its cost, and the text stays the target's."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from enumeration import distance, law_of
from families import FAMILIES, build
from published_cascade import Published
from test_draft_model import llama, near
from test_exactness import BaseLaw, padded_left, small_base
from test_maxgram import published as published_maxgram

import specheads
from specheads import (
    Block,
    Cascade,
    CSLeniency,
    DraftModel,
    Exact,
    Fuzzy,
    MaxGram,
    NGram,
    NGramStorage,
    PromptLookup,
    Target,
    Typical,
    chain,
    convert,
    decode,
)
from specheads.bench.cost import published, walltime_improvement

T5_SIZES, T5_WORK, LLAMA = (
    [[5, 14, 10], [0, 1, 10], [0, 0, 10]],
    [[5, 8, 10], [0, 1, 10], [0, 0, 10]],
    [[13, 10], [0, 10]],
)
BIGRAMS = [(token + 1) % 97 for token in range(97)]


def cascade(base, *noise, bottom=None, k_matrix=LLAMA, **options):
    models = [near(base, size) for size in noise]
    return Cascade([*map(DraftModel, models), *([bottom] if bottom else [])], k_matrix, **options)


# --- The published algorithm ---


def periodic(base, period=7):
    """The base's text behind a prompt that repeats itself, so that n-grams are often right."""
    prompt = (list(range(20, 20 + period)) * 3)[: 2 * period + 3]
    ids = torch.tensor([prompt])
    return prompt, base.generate(ids, do_sample=False, max_new_tokens=150, eos_token_id=96)[0].tolist()


@pytest.fixture(scope="module")
def world():
    base = llama()
    prompt, record = periodic(base)
    return base, prompt, record, {noise: near(base, noise) for noise in (0.02, 0.05)}


@pytest.mark.parametrize("leniency", [1, 2, 3])
@pytest.mark.parametrize(
    ("levels", "k_matrix", "bottom"),
    [
        (1, LLAMA, True), (2, T5_SIZES, True), (2, T5_WORK, True), (2, [[0, 3, 2], [0, 2, 0], [0, 0, 4]], True),
        (2, [[4, 2], [0, 2]], False),
    ],
    ids=["Llama", "T5 by size", "T5 by previous work", "a draft only reviews", "no n-grams"],
)  # fmt: skip
def test_proposals_reviews_and_swi_are_those_of_a_direct_simulation(world, levels, k_matrix, bottom, leniency):
    base, prompt, record, small = world
    models, names = list(small.values())[:levels], ["llama-160m", "llama-68m"][:levels]
    copies = MaxGram(bigrams=BIGRAMS)
    if k_matrix[0][0] == 0:
        k_matrix = [[2, 3, 2], [0, 0, 3], [0, 0, 4]]
    drafter = Cascade([*map(DraftModel, models), *([copies] if bottom else [])], k_matrix, leniency)
    proposed, counted, fed = [], [], [0] * levels
    hooks = [
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, out, i=i: fed.__setitem__(i, fed[i] + args[0].numel())
        )
        for i, model in enumerate(models)
    ]

    class Noted(Cascade):
        def propose(self, context, sampler, plan):
            tree = super().propose(context, sampler, plan)
            proposed.append(tree.tokens[0, 1:].tolist())
            counted.append((self.reviews, tuple(fed)))
            return tree

    drafter.__class__ = Noted
    out = specheads.generate(
        base, torch.tensor([prompt]), drafter=drafter, do_sample=False, max_new_tokens=150, eos_token_id=96
    )
    for hook in hooks:
        hook.remove()
    assert out[0].tolist() == record

    direct = Published(
        models, (lambda ids: published_maxgram(ids, 10, BIGRAMS)) if bottom else None, k_matrix, leniency, record
    )
    ids, proposals = direct.generate(len(prompt), until=len(record) - 60)  # far from the length limit
    rounds = len(proposals)
    assert rounds > 5 and len(set(map(len, proposals))) > (1 if bottom else 0)
    assert proposed[:rounds] == proposals
    reviews, read = counted[rounds - 1]
    assert reviews[:levels] == tuple(direct.reviews[1:])
    prompt_and_first_token_unread = [len(prompt)] * levels
    assert [a - b for a, b in zip(read, prompt_and_first_token_unread, strict=True)] == direct.fed
    costs = published("model_parameters", ["Llama-7b", *names])
    tokens = len(ids) - len(prompt)
    own = walltime_improvement(tokens, [1 + rounds, *reviews[:levels]], costs)
    assert own == tokens * 7000 / sum(n * c for n, c in zip(direct.reviews, (7000, 160, 68), strict=False))
