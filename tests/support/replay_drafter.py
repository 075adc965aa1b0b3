"""Prompts, a drafter that knows the text it drafts for, and the comparison with Hugging Face's own generate()."""

import torch

from specheads import DraftTree, StaticTree


class Replay:
    """Drafts a known text, each right token after a wrong sibling, and a wrong path at every fifth index.

    So drafts of every length from 0 to 3 are accepted, whatever options the text was made with.
    """

    layers = ()
    plan = StaticTree(((0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)))

    def __init__(self, inputs, sequences):
        columns = inputs["input_ids"].shape[1]
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        self.texts = [
            ids[own].tolist() + row[columns:].tolist()
            for ids, own, row in zip(inputs["input_ids"], mask, sequences, strict=True)
        ]

    def default_plan(self, device, do_sample):
        return self.plan

    def propose(self, context, sampler, plan):
        tokens = []
        for text, history in zip(self.texts, context.history, strict=True):
            row = [int(context.root[len(tokens)])]
            for index in range(len(history), len(history) + 3):
                right = text[index] if index < len(text) else 3
                wrong = 3 + (right + 1) % 90
                row += [wrong, right if index % 5 else 3 + (right + 2) % 90]
            tokens.append(row)
        parents = torch.tensor([[-1, 0, 0, 2, 2, 4, 4]]).expand(len(tokens), -1)
        return DraftTree(torch.tensor(tokens), parents, 3)


def assert_same(model, inputs, *, accepted=1.5, reference=None, **options):
    """model.generate gives base.generate's text, and got there by accepting drafts."""
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    expected = model.base.generate(**inputs, **options) if reference is None else reference
    out = model.generate(**inputs, **options, draft=Replay(inputs, expected), return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.statistics()["accepted_length"] > accepted
    assert torch.equal(model.generate(**inputs, **options), expected)
    return out
