"""The forms of a parallel head's block (DFlash 2, DSpark's gated and recurrent bias, Domino): as plain DFlash at the
start, then learnt. Their logits and losses are compared with slow ones in test_parallel.py and test_heads_loss.py."""

import pytest
import torch

from specheads import BestFirstTree, chain, convert
from specheads.losses.objective import rank_of
from tests.reference.slow_heads import FORMS
from tests.support.assert_drafts import Recorded
from tests.support.tiny_models import tiny_llama

BLOCK = {"sample_from_anchor": False, "block_size": 6, "causal": False, "mask_token_id": 5, "markov_rank": 16}
LEARNT = {
    "DFlash 2": {**BLOCK, "markov_type": "selector", "candidates": 8, "conv_taps": 2, "conv_group": 8},
    "rnn": {**BLOCK, "markov_type": "rnn", "confidence": True},
    "Domino": {**BLOCK, "markov_type": "domino", "gru_size": 16},
}


@pytest.fixture(scope="module")
def base():
    return tiny_llama()


@pytest.fixture(scope="module")
def text(base):
    ids = torch.tensor([[7], [31], [55]])
    return base.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=97, pad_token_id=0)


def test_each_form_begins_as_the_plain_head(base, text):
    for name, options in FORMS.items():
        plain_options = {k: v for k, v in options.items() if not k.startswith(("markov", "conv", "confidence"))}
        model = convert(base, "parallel", **options).eval()
        plain = convert(base, "parallel", **{**plain_options, "markov_rank": 0}).eval()
        plain.head.load_state_dict(model.head.state_dict(), strict=False)
        plans = Recorded(2), Recorded(2)
        for one, plan in zip((model, plain), plans, strict=True):
            one.generate(text[:1, :9], max_new_tokens=6, do_sample=False, tree=plan)
        for one, other in zip(plans[0].drafts, plans[1].drafts, strict=True):
            for (token, logits, _), (same, expected, _) in zip(one, other, strict=True):
                can = logits > -torch.inf
                assert token == same and torch.equal(logits[can], expected[can]), name
                assert int(can.sum()) == (options["candidates"] if "candidates" in options else len(can))


@pytest.mark.parametrize("form", LEARNT)
def test_each_form_learns_and_writes_the_bases_text_in_chains_and_trees(form, base, text):
    torch.manual_seed(0)
    model = convert(base, "parallel", **LEARNT[form]).train()
    optimizer = torch.optim.AdamW([p for p in model.head.parameters() if p.requires_grad], lr=1e-2)
    options = {"max_new_tokens": 34, "do_sample": False, "eos_token_id": 97, "return_dict_in_generate": True}
    lengths, losses, terms = [], [], []
    for step in range(61):
        if step % 60 == 0:
            model.eval()
            for tree in (chain(5), BestFirstTree(12, 5, 4)):
                out = model.generate(text[:1, :3], tree=tree, **options)
                assert torch.equal(out.sequences, text[:1, : out.sequences.shape[1]])
                lengths.append(out.statistics()["accepted_length"])
            model.train()
        optimizer.zero_grad()
        model.progress = step / 60
        out = model(text, labels=text)
        out.loss.backward()
        optimizer.step()
        losses.append(float(out.loss.detach()))
        terms.append({name: float(term) for name, term in out.terms.items()})
    for name in {"DFlash 2": ["selector"], "rnn": ["confidence"]}.get(form, []):
        assert terms[-1][name] < terms[0][name], name
    assert losses[-1] < 0.5 * losses[0] and lengths[2] > lengths[0] + 1 and lengths[3] > lengths[1] + 1, lengths
    for name, parameter in model.head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_token_that_a_selector_does_not_draft_has_no_rank():
    logits = torch.tensor([[0.5, -torch.inf, 2.0, 1.0], [-torch.inf, 0.0, -torch.inf, 1.0]])
    assert rank_of(logits, torch.tensor([0, 2])).tolist() == [2, -1]


def test_a_wrong_option_is_refused(base):
    for options, message in (
        ({"markov_type": "lstm"}, "markov_type='lstm'; expected vanilla, gated, rnn, selector, domino"),
        ({"markov_type": "gated", "markov_rank": 0}, "markov_type=gated needs a markov_rank of 1 or more"),
        ({"markov_type": "selector", "candidates": 98}, "candidates=98 exceeds the 97 tokens it drafts"),
        ({"own_mask": False}, "own_mask=false needs a mask_token_id"),
        ({"conv_taps": 9}, "conv_taps=9 spans more than a block of 8 slots"),
        ({"conv_taps": 2, "conv_group": 5}, "conv_group=5 must divide hidden_size=32"),
        ({"logit_cap": 0.0}, "logit_cap=0.0 must be at least"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(base, "parallel", **options)
