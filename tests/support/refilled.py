"""What the tests of refilled batches share: prompts, drafters of every kind, and the text of a prompt alone."""

import itertools
import random

import torch

import specheads
from specheads import Cascade, DraftModel, MaxGram, NGram, PromptLookup, convert
from specheads.decoding.drafters import AutoDrafter
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from tests.support.tiny_models import near, repetitive_model

COIN = random.Random(0)
LENGTHS = (5, 1, 30, 2, 9, 64, 17, 3, 1, 70, 8)
PROMPTS = [[COIN.randrange(3, 97) for _ in range(length)] for length in LENGTHS]
ENDS = {"eos_token_id": [10, 34, 37, 63, 76, 95], "pad_token_id": 0}
GREEDY = {"max_new_tokens": 24, "do_sample": False, **ENDS}
WARM = {"max_new_tokens": 16, "do_sample": True, "seed": 5, **ENDS}
BASE = repetitive_model("Llama")
HEADS = {
    "medusa": {"num_heads": 3}, "hydra": {"num_heads": 3, "prefix_layer": True}, "eagle": {}, "eagle3": {},
    "mtp": {"num_modules": 2},
    "parallel": {"block_size": 4}, "dflash": {"sample_from_anchor": False, "block_size": 5, "causal": False},
}  # fmt: skip
LINE = Curve(((1, 4.0), (64, 4.5)))
CHEAP = CostTable(None, {1: StepCosts(1, {64: LINE}, LINE, LINE, Curve(((1, 0.1),)), Curve(((1, 0.1),)))})


def head(name, base=BASE):
    """An untrained head, away from the base's own weights so that its drafts depend on all that it reads."""
    torch.manual_seed(1)
    own = convert(base, {"dflash": "parallel"}.get(name, name), **HEADS[name]).head
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return own


def small():
    return DraftModel(near(BASE, 0.05))


DRAFTERS = {
    "automatic": lambda: AutoDrafter(head("eagle3"), CHEAP), "automatic copies": lambda: AutoDrafter(None, CHEAP),
    "none": lambda: None, "lookup": lambda: PromptLookup(4), "n-grams": lambda: NGram(4, filler_top_k=2),
    "max-gram": lambda: MaxGram(4), "draft model": small,
    "cascade": lambda: Cascade([small(), MaxGram()], [[2, 3], [0, 3]]),
    "cascade with a head": lambda: Cascade([head("eagle3"), small(), NGram(3)], [[2, 2, 0], [0, 2, 2], [0, 0, 2]]),
    **{name: lambda name=name: head(name) for name in HEADS},
}  # fmt: skip


# Others' drafts decide whether a row's own pay, and n-grams help each other, so their steps depend on the batch.
SHARED = {"n-grams", "cascade with a head", "automatic", "automatic copies"}


def alone(result, base=BASE, **options):
    """The new tokens of each step of generate() for the prompt of a result by itself."""
    options = {**options, "seed": result.seed, "return_dict_in_generate": True}
    ids = torch.tensor([result.prompt])
    out = specheads.generate(base, ids, attention_mask=torch.ones_like(ids), **options)
    return [step.tokens[0] for step in out.steps]


def assert_as_alone(results, base=BASE, *, steps=True, **options):
    """steps: also that each step gave the same tokens, so that the drafts were the same too."""
    for one in results:
        wanted, found = alone(one, base, **options), [step.tokens[0] for step in one.steps]
        assert one.tokens == list(itertools.chain(*wanted)) == list(itertools.chain(*found)), one.index
        assert not steps or found == wanted, one.index
