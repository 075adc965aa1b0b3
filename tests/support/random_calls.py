"""Calls of generate() drawn at random: a base, prompts, options of generate(), and what drafts."""

import functools
import random
from dataclasses import dataclass

import torch
from transformers import StoppingCriteriaList

from specheads import DraftModel, convert
from specheads.decoding.drafters.auto import AutoDrafter
from tests.support.auto_costs import DEAR, FREE, RANKS, table
from tests.support.families import FAMILIES, RECURRENT, VOCAB, build
from tests.support.knowing_drafter import KnowingDrafter
from tests.support.prompts import padded
from tests.support.tiny_models import near

BASES = FAMILIES | RECURRENT
HEADS = {
    "medusa": {"num_heads": 4}, "hydra": {}, "eagle": {}, "eagle3": {}, "parallel": {"block_size": 5},
}  # fmt: skip
TREES = ("chain:1", "chain:4", "comb:3,2", "dynamic:12,4,3", "best:10,4,3", "static:9")
COSTS = {"free": FREE, "dear": DEAR, "between": table(0.4, acceptance=RANKS)}
# What a logits processor does depends on the text so far, the prompt, its length, or nothing but the logits.
PROCESSORS = (
    {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [7, 9]]},
    {"suppress_tokens": [4, 8, 15]}, {"begin_suppress_tokens": list(range(20, 60))}, {"forced_eos_token_id": 12},
    {"sequence_bias": {(6,): 3.0, (11, 12): -4.0}}, {"renormalize_logits": True},
)  # fmt: skip
OF_ENDINGS = ({"min_new_tokens": 7}, {"min_length": 25}, {"exponential_decay_length_penalty": (3, 1.3)})
WARPERS = (
    {"temperature": 0.6}, {"temperature": 1.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9},
    {"epsilon_cutoff": 0.02},
)  # fmt: skip


@functools.cache
def base_named(name):
    """A tiny model in float64, so that no order of additions changes a token."""
    base = build(*BASES[name]).double()
    base.set_experts_implementation("eager")  # torch multiplies by several experts at once in float32 at most
    return base


@functools.cache
def head_named(base, head):
    torch.manual_seed(0)
    return convert(base_named(base), head, **HEADS[head]).head


@functools.cache
def draft_model(base):
    return DraftModel(near(base_named(base), 0.02))


def ends_with_three_times(ids, scores, **kwargs):
    """Which rows end with a multiple of three, an even number of tokens after the start."""
    return (ids[:, -1] % 3 == 0) & (ids.shape[1] % 2 == 0)


@dataclass
class Call:
    """base: its family. rows: the prompts. options: of transformers' generate(), sampling among them. draft: by name;
    tree, accept, compile: as generate() takes them.
    outputs: are scores and logits wanted?"""

    base: str
    rows: list[list[int]]
    options: dict
    draft: str
    tree: str | None
    accept: str | None
    compile: str | bool
    outputs: bool

    def drafter(self, texts):
        """The drafter. texts: of each row, which `knowing` drafts."""
        kind, _, rest = self.draft.partition(" ")
        if kind == "knowing":
            return KnowingDrafter(texts)
        if kind == "auto":
            head, costs = rest.split()
            return AutoDrafter(None if head == "alone" else head_named(self.base, head), COSTS[costs])
        if kind == "model":
            return draft_model(self.base)
        return head_named(self.base, rest) if kind == "head" else self.draft

    @property
    def inputs(self):
        return padded(self.rows)


def draw(seed):
    """The call of this seed."""
    coin = random.Random(seed)
    base = coin.choice(list(BASES))
    # Few different ids, so that some of what follows occurred before.
    ids = coin.sample(range(3, VOCAB), coin.choice((3, 8, 60)))
    rows = [coin.choices(ids, k=coin.choice((1, 2, 9, 21))) for _ in range(coin.choice((1, 1, 2, 3, 5)))]
    limit = coin.choice((1, 2, 3, 8, 17, 33))
    options = coin.choice(({"max_new_tokens": limit}, {"max_length": max(map(len, rows)) + limit}))
    options |= {"do_sample": coin.random() < 0.3}
    options["eos_token_id"] = coin.choice((None, 11, coin.sample(range(3, VOCAB), 6)))
    some = PROCESSORS if options["eos_token_id"] is None else (*PROCESSORS, *OF_ENDINGS)
    for extra in coin.sample(some, coin.choice((0, 0, 1, 2))):
        options |= extra
    # Without an end token transformers writes on in a row that has stopped, until all rows have.
    if options["eos_token_id"] is not None and coin.random() < 0.2:
        options["stopping_criteria"] = StoppingCriteriaList([ends_with_three_times])
    if options["do_sample"]:
        options |= {"seed": coin.randrange(1000)}
        for extra in coin.sample(WARPERS, coin.choice((0, 1, 2))):
            options |= extra
    head = coin.choice(list(HEADS))
    draft = coin.choice((
        "knowing", "knowing", "knowing", "lookup:3", "ngram", "maxgram", "model", f"head {head}",
        f"auto {coin.choice((head, 'alone'))} {coin.choice(list(COSTS))}",
    ))  # fmt: skip
    accept = None if options["do_sample"] or draft not in ("model", f"head {head}") else coin.choice((None, "block"))
    # A draft model draws its drafts where it samples and no tree is given: another text of the same law.
    tree = coin.choice(TREES if draft == "model" else (None, *TREES))
    compile = "eager" if coin.random() < 0.1 else False
    return Call(base, rows, options, draft, tree, accept, compile, outputs=coin.random() < 0.2)


def draw_many(seed):
    """A call of generate_many(), with a limit for each prompt. The drafter knows no text."""
    coin, call = random.Random(seed), draw(seed + 10_000)
    while call.draft == "knowing" or "stopping_criteria" in call.options:
        call = draw(coin.randrange(10**6))
    call.rows = [coin.choices(range(3, VOCAB), k=coin.choice((1, 2, 9, 21))) for _ in range(coin.choice((1, 4, 9)))]
    call.options.pop("max_length", None)
    call.options |= {
        "max_new_tokens": [coin.choice((1, 2, 8, 24)) for _ in call.rows],
        "batch_size": coin.choice((1, 2, 3)),
    }
    return call
