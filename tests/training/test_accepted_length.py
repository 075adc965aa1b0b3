"""The accepted length of training and evaluation is what decoding counts, up to the last token of each answer."""

import pytest
import torch

from specheads.data.batches import Collator, pack
from specheads.decoding.planner import StaticTree, chain
from specheads.losses.metrics import AcceptanceMeter
from tests.reference.slow_heads import KINDS
from tests.support.learnt_heads import PROMPTS, learnt

TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
HEADS = [*((kind, {}) for kind in KINDS), ("parallel", {"sample_from_anchor": False, "block_size": 4})]


def gains(model, text, start, end, plan):
    """Tokens of the first step that drafts, when decoding goes on after text[:start]."""
    model.generation_config.eos_token_id = text[-1] if end == "eos" else None
    asked = {"max_new_tokens": 60 if end == "eos" else len(text) - start, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([text[:start]]), tree=plan, do_sample=False, **asked)
    assert out.sequences[0].tolist() == text
    return len(out.steps[1].tokens[0])


def answers(model, most):
    """Prompts with the base's own answers, each ended by a token that it does not hold before."""
    for prompt in PROMPTS:
        whole = model.base.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False)[0].tolist()
        for end in range(len(prompt) + 2, len(whole) + 1):
            if whole[end - 1] not in whole[: end - 1]:
                yield prompt, whole[:end]


@pytest.mark.parametrize("end", ["eos", "limit"])
@pytest.mark.parametrize(("kind", "options"), HEADS)
@pytest.mark.sampled(4)
def test_it_is_the_mean_gain_of_decoding_from_every_token_of_every_answer(kind, options, end):
    model = learnt(kind, **options).eval()
    model.generation_config.eos_token_id = None
    depths, rows, chains, trees = model.head.scored_depths, [], [], []
    for prompt, text in answers(model, 7):
        rows.append({"input_ids": text, "labels": [-100] * len(prompt) + text[len(prompt) :]})
        for start in range(len(prompt), len(text) - 1):
            chains.append(gains(model, text, start, end, chain(depths)))
            trees.append(gains(model, text, start, end, TREE))
    assert len(rows) > 5 and max(chains) > 2 and min(len(row["labels"]) for row in rows) < 2 + depths
    for batch in (rows, pack(rows, 40)):
        with torch.no_grad():
            out = model(**Collator(0)(batch))
        meter = AcceptanceMeter(TREE)
        meter.add(out.ranks, out.overlaps)
        found = meter.compute()
        assert len(out.ranks) == len(chains)
        assert found["accepted_length"] == pytest.approx(sum(chains) / len(chains))
        assert found["accepted_length_tree"] == pytest.approx(sum(trees) / len(trees))
