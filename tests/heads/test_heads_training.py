"""Training a head leaves the base as it is, and makes the head draft better."""

import pytest
import torch

from specheads.data.datasets import Collator
from specheads.losses.metrics import accepted_length
from specheads.models.convert import convert
from tests.reference.slow_heads import DEFAULTS, KINDS, rows, spec_model
from tests.support.tiny_models import gpt2, tiny_llama


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_frozen_and_in_evaluation_mode(kind):
    model = spec_model(kind)
    for mode in (True, False):
        model.train(mode)
        assert model.head.training is mode
        assert not any(module.training for module in model.base.modules())
    model.train()(**Collator(0)(rows(9))).loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in model.base.parameters())
    assert all(p.grad is not None for p in model.head.parameters())


def test_the_layers_of_an_mtp_head_are_trained_without_the_dropout_of_the_bases_config():
    base, batch = gpt2(), Collator(0)(rows(9, 7))
    assert base.config.resid_pdrop > 0 and base.config.attn_pdrop > 0
    model = convert(base, "mtp")
    losses = [float(model.train(mode)(**batch).loss.detach()) for mode in (True, True, False)]
    assert losses == [losses[0]] * 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_learns_to_draft(kind):
    """On what the base itself writes, which is where drafts come from."""
    base = tiny_llama(num_hidden_layers=2)
    torch.manual_seed(0)
    prompts = torch.randint(3, 97, (8, 4))
    texts = base.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=28, do_sample=False)
    model = convert(base, kind, **{**DEFAULTS[kind], **({"draft_vocab_size": 97} if kind == "eagle3" else {})})
    batch = {"input_ids": texts, "loss_mask": torch.ones_like(texts)}
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    before = accepted_length(model.eval()(**batch).ranks)
    model.train()
    for _ in range(30):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    after = accepted_length(model.eval()(**batch).ranks)
    assert before < 1.3 and after > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_of_the_same_parameters_whatever_a_batch_holds(kind):
    """Launchers add up the gradients of processes that were given other rows, and take them to be of the same
    parameters in the same order."""
    model = spec_model(kind).train()
    trained, order = {n: p for n, p in model.head.named_parameters() if p.requires_grad}, {}
    for name, parameter in trained.items():
        parameter.register_hook(lambda _, name=name: order.setdefault(name))
    model(**Collator(0)(rows(12, 7))).loss.backward()
    usual = list(order)
    assert set(usual) == set(trained)
    for lengths, supervised in (((9,), False), ((1,), True), ((2, 2), True), ((3,), True), ((3,), False)):
        order.clear()
        batch = Collator(0)(rows(*lengths))
        if not supervised:
            batch["labels"].fill_(-100)
        model(**batch).loss.backward()
        assert list(order) == usual, (lengths, supervised)
