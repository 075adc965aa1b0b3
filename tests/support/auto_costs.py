"""Made-up costs of a step, and trained heads, for the tests of automatic drafts."""

import torch

import specheads
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from tests.support.prompts import padded
from tests.support.tiny_models import repetitive_model

ONE = padded([[5, 5, 60, 61, 5, 5, 60]])
OPTIONS = {"max_new_tokens": 48, "pad_token_id": 0, "eos_token_id": 96, "return_dict_in_generate": True}

RANKS = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.3, 0.3, 0.2))


def costs(per_node=1.0, plain=4.0, read=0.5, level=0.5, batch=1):
    """Of a step that takes `plain` milliseconds, and per_node more with each node."""
    line = Curve(((1, plain), (64, plain + 63 * per_node)))
    flat = Curve(((1, 0.0),))
    return StepCosts(batch, {64: line}, flat, flat, Curve(((1, read),)), Curve(((1, level),)))


def table(per_node, level=0.3, plain=4.0, acceptance=()):
    verify = {64: Curve(((1, plain), (64, plain + 63 * per_node))), 512: Curve(((1, 2 * plain),))}
    flat = Curve(((1, 0.0),))
    costs = StepCosts(1, verify, flat, flat, Curve(((1, level), (64, 3 * level))), Curve(((1, level), (8, 2 * level))))
    return CostTable(None, {1: costs}, acceptance)


FREE, DEAR = table(0.001, 0.001), table(1.5, 1.0)  # drafts cost next to nothing; a node costs a third of a plain step
HEADS = {
    "medusa": {"num_heads": 3}, "hydra": {"prefix_layer": True}, "eagle": {}, "eagle3": {"steps": 3},
    "mtp": {"steps": 3}, "parallel": {"block_size": 4, "markov_rank": 16},
    "parallel, not causal": {"block_size": 5, "causal": False, "sample_from_anchor": False},
}  # fmt: skip


class Trained(dict):
    """By kind, heads of one base whose text repeats itself, each trained a little on it when it is first asked for."""

    def __init__(self):
        super().__init__()
        self.base = repetitive_model("Llama")
        options = {"max_new_tokens": 100, "do_sample": False, "eos_token_id": 97, "pad_token_id": 0}
        self.ids = self.base.generate(torch.tensor([[7]]), **options)

    def __missing__(self, name):
        torch.manual_seed(0)
        model = specheads.convert(self.base, name.partition(",")[0], **HEADS[name]).train()
        optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-2)
        for _ in range(25):
            optimizer.zero_grad()
            model(self.ids, labels=self.ids).loss.backward()
            optimizer.step()
        self[name] = model.eval()
        return model
