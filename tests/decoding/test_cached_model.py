"""CachedModel: each token is fed once, and all logits are those of an uncached forward, whoever drafted the text."""

from types import SimpleNamespace

import pytest
import torch

import specheads
from specheads import DraftModel, DraftTree, chain
from specheads.decoding.drafters.cached_model import CachedModel
from tests.decoding.test_cache import BASES, plain_logits
from tests.decoding.test_draft_model import PLANS
from tests.support.prompts import padded
from tests.support.tiny_models import llama, near


class Checked(DraftModel):
    """Compares all logits it drafts from with an uncached forward over the row's text and the drafted path.

    other_drafts(context) may return drafts by row to propose instead of its own.
    """

    checked = 0

    def __init__(self, small, other_drafts=lambda context: None, **options):
        super().__init__(small, **options)
        self.other_drafts = other_drafts

    def propose(self, context, sampler, plan):
        def grow(root, expand, sampler, vocab_size):
            texts = [row.ids for row in context.memory["rows"]] if self.through_text else context.history
            paths = [[row] for row in texts]

            def checking(tokens, parents):
                nonlocal paths
                if parents is not None:
                    paths = [
                        [[*own[parent], token] for token, parent in zip(row, above, strict=True)]
                        for own, row, above in zip(paths, tokens.tolist(), parents.tolist(), strict=True)
                    ]
                scored = expand(tokens, parents)
                self.compare(paths, scored.logits, context.target.limit)
                return scored

            return plan.grow(root, checking, sampler, vocab_size)

        spy = SimpleNamespace(
            num_nodes=plan.num_nodes, depth=plan.depth, drafting_slots=plan.drafting_slots, sampled=False, grow=grow
        )
        tree = super().propose(context, sampler, spy)
        drafts = self.other_drafts(context)
        return tree if drafts is None else DraftTree.chains(context.root, drafts)

    @torch.no_grad()
    def compare(self, paths, logits, limit):
        for row, row_logits in zip(paths, logits, strict=True):
            if self.through_text or len(row[0]) <= limit:  # past it nothing is emitted, and positions coincide
                fresh = self.small(torch.tensor(row), use_cache=False).logits[:, -1]
                torch.testing.assert_close(row_logits, fresh, rtol=1e-3, atol=1e-3)
                self.checked += len(row)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("plan", ["chain of 4", "static", "dynamic", "sampled"])
@pytest.mark.parametrize("kind", BASES)
def test_the_small_models_logits_are_those_of_an_uncached_forward(kind, plan):
    base = BASES[kind]()
    inputs = padded([[31], [5, 6, 7, 8, 9], list(range(40, 53))])
    options = {"do_sample": False, "max_new_tokens": 12}
    drafter = Checked(near(base))
    out = specheads.generate(base, **inputs, **options, draft=drafter, tree=PLANS[plan], return_dict_in_generate=True)
    assert torch.equal(out.sequences, base.generate(**inputs, **options))
    assert drafter.checked > 40
    assert any(len(set(step.accepted)) > 1 for step in out.steps), "rows never accepted different lengths"


def test_the_small_model_follows_text_that_others_drafted():
    """These drafts are longer than its own, so they are fed in several passes. Some steps use its own draft."""
    base = llama()
    rows = [[31], [5, 6, 7, 8, 9]]
    inputs, options = padded(rows), {"do_sample": False, "max_new_tokens": 30}
    expected = base.generate(**inputs, **options)
    texts = [text[5 - len(row) :].tolist() for text, row in zip(expected, rows, strict=True)]

    def other_drafts(context):
        if len(context.history[0]) % 3 == 0:
            return None
        return [
            text[len(row) : len(row) + 3 + b] for b, (text, row) in enumerate(zip(texts, context.history, strict=True))
        ]

    plan = chain(2)
    roomy = SimpleNamespace(num_nodes=6, depth=2, drafting_slots=1, grow=plan.grow, limited=plan.limited)
    drafter = Checked(near(base), other_drafts)
    out = specheads.generate(base, **inputs, **options, draft=drafter, tree=roomy, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert max(max(step.accepted) for step in out.steps) > 2 and drafter.checked > 20


@pytest.mark.parametrize("depth", [1, 4])
def test_the_small_model_is_fed_each_token_once(depth):
    base = llama()
    small, fed = near(base), []
    drafter = DraftModel(small)
    small.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    inputs = padded([[5, 6, 7, 8, 9]])
    out = specheads.generate(
        base, **inputs, draft=drafter, tree=chain(depth), do_sample=False, max_new_tokens=30,
        return_dict_in_generate=True,
    )  # fmt: skip
    *before, last = [step for step in out.steps[1:] if step.drafted[0]]  # the last of all may need no draft
    assert len({step.accepted[0] for step in before}) > 1
    text = 5 + 1 + sum(step.accepted[0] + 1 for step in before)  # as far as the last draft could see
    drafted = sum(step.drafted[0] - 1 for step in (*before, last))  # the last token of a draft is not fed
    became_text = sum(min(step.accepted[0], step.drafted[0] - 1) for step in before)
    assert sum(fed) == text + drafted - became_text


def test_drafts_after_text_that_changed_are_not_committed():
    model = llama()
    cached = CachedModel(model, [[5, 6, 7], [8, 9]], scratch=2, limit=20)
    cached.draft(torch.tensor([[11], [12]]), torch.zeros(2, 1, dtype=torch.long))
    cached.rewind(torch.tensor([2, 2]))  # removes the first row's 7
    logits = cached.read(torch.tensor([[11, 13], [12, 13]]), torch.tensor([2, 2]), bound=4)
    for row, text in zip(logits, ([5, 6, 11, 13], [8, 9, 12, 13]), strict=True):
        torch.testing.assert_close(row[0], plain_logits(model, text), rtol=1e-3, atol=1e-3)
