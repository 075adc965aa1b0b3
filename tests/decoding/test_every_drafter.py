"""Every drafter writes the target's greedy text, token for token, over three architectures: prompts of one token and
of 1500, endings and limits inside drafts."""

import random
from functools import cache

import pytest
import torch

from specheads import DraftModel, MaxGram, NGram, NGramStorage, OneLevelNGramStorage, PromptLookup, chain, convert
from specheads.decoding.generation.generate import generate
from tests.support.prompts import padded
from tests.support.tiny_models import near, repetitive_model

V, PAD, NEW, NEVER = 97, 0, 64, 97
BASES = ("Llama", "Qwen3", "GPT-2")
HEADS = {
    "medusa": {"num_heads": 4}, "hydra": {"prefix_layer": True}, "eagle": {"token_loss_weight": 1.0, "noise": 0.0},
    "eagle3": {"steps": 3}, "p-eagle": {"steps": 4, "mask_token_id": 0}, "mtp": {"steps": 3, "num_modules": 2},
    "parallel": {"block_size": 4, "markov_rank": 16, "anchors": 32},
    "dflash": {"sample_from_anchor": False, "block_size": 5, "causal": False, "markov_rank": 0, "anchors": 32},
}  # fmt: skip
COPYING = {
    "lookup": lambda: PromptLookup(4),
    "n-grams": lambda: NGram(4, storage=NGramStorage(3, V), filler_top_k=2),
    "n-grams of one level": lambda: NGram(4, 3, storage=OneLevelNGramStorage(2, V)),
    "max-gram": lambda: MaxGram(4),
}
DRAFTERS = (*HEADS, "draft model", *COPYING)


@cache
def target(name):
    """A tiny model, three prompts as rows, and the prompts with its greedy text."""
    base, coin = repetitive_model(name), random.Random(0)
    options = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": PAD}
    own = base.generate(torch.tensor([[7]]), max_new_tokens=119, **options)[0].tolist()  # text that comes back later
    rows = [[7], [coin.randrange(3, V) for _ in range(1500)], own]
    texts = [base.generate(torch.tensor([row]), max_new_tokens=NEW, **options)[0].tolist() for row in rows]
    return base, rows, texts


def drafter_of(name, base, texts):
    """Heads are trained on the last text, so that drafts are accepted and cut at every depth."""
    if name in COPYING:
        return COPYING[name](), None
    if name == "draft model":
        return DraftModel(near(base, 0.01)), chain(4)
    torch.manual_seed(0)
    model = convert(base, {"dflash": "parallel", "p-eagle": "eagle3"}.get(name, name), **HEADS[name]).train()
    ids = torch.tensor(texts[2:])
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        optimizer.step()
    return model.eval().head, chain(4)


def padded_texts(rows, texts):
    """What generate() returns after the prompts of texts, padded_texts to one length."""
    longest = max(len(text) - len(row) for row, text in zip(rows, texts, strict=True))
    new = [text[len(row) :] for row, text in zip(rows, texts, strict=True)]
    return torch.tensor([more + [PAD] * (longest - len(more)) for more in new])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.sampled(19)
def test_every_drafter_writes_the_targets_greedy_text(name, drafter):
    base, rows, texts = target(name)
    own, plan = drafter_of(drafter, base, texts)

    def steps_of(which, limit=NEW, end=NEVER):
        """The steps of a batch, whose text is the target's up to the end or the limit."""
        prompts = [rows[i] for i in which]
        out = generate(
            base, **padded(prompts), draft=own, tree=plan, do_sample=False, max_new_tokens=limit,
            eos_token_id=end, pad_token_id=PAD, return_dict_in_generate=True,
        )  # fmt: skip
        wanted = []
        for i in which:
            more = texts[i][len(rows[i]) :][:limit]
            wanted.append(rows[i] + (more[: more.index(end) + 1] if end in more else more))
        assert torch.equal(out.sequences[:, max(map(len, prompts)) :], padded_texts(prompts, wanted))
        return out.steps

    steps_of([0, 1, 2])
    accepted = []  # prompt, index and token of what was drafted and accepted
    for i in range(3):
        index = 0
        for step in steps_of([i]):
            accepted += [(i, index + n, step.tokens[0][n]) for n in range(step.accepted[0])]
            index += len(step.tokens[0])
    assert len(accepted) >= 3, "hardly a draft was accepted, so this shows little"
    for i, index, _ in accepted[-2:]:
        _, *steps = steps_of([i], limit=index + 1)
        assert all(len(step.tokens[0]) == step.accepted[0] + 1 for step in steps), "the limit cut a draft"
        steps_of([i, 0], limit=index + 1)
    ends = [(i, index, end) for i, index, end in accepted if texts[i][len(rows[i]) :].index(end) == index]
    assert ends, "no token was drafted before it was written"
    for i, _, end in ends[-2:]:
        last = steps_of([i], end=end)[-1]
        assert len(last.tokens[0]) == last.accepted[0] > 0, "the end cut no draft"
        steps_of([0, i], end=end)
