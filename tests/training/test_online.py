"""HeadUpdater: a step is the step of SpecModel's own loss, the base stays as it is, costs are bounded, runs resume."""

import copy
import io

import pytest
import torch
from torch import nn

from specheads.training.observed import Observed
from specheads.training.online import HeadUpdater
from tests.reference.slow_heads import DEFAULTS, spec_model
from tests.support.learnt_heads import learnt
from tests.support.prompts import padded
from tests.support.tiny_models import tiny_llama

TEXTS = ([27, 42, 22, 85, 13, 36, 51, 8], [44, 9, 61], [5, 5, 81, 62, 30, 7, 12, 90, 17, 33])


def policy_of(model):
    """The model's base as a trainer has it: all of its weights train."""
    return model.base.requires_grad_(True)


def float_model(kind, **options):
    return spec_model(kind, tiny_llama(num_hidden_layers=4), **options)


def weights_of(head):
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


def same(first, other, close=0.0):
    return all(torch.allclose(first[name], other[name], rtol=0, atol=close) for name in first)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_step_is_one_of_the_models_own_loss_and_leaves_the_base_alone(kind):
    model = float_model(kind)
    expected, base = copy.deepcopy(model), policy_of(model)
    before = {name: p.clone() for name, p in base.named_parameters()}
    batch = padded(TEXTS)
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    labels[:, :6] = -100
    updater = HeadUpdater(model.head, base, learning_rate=1e-2, every=1, max_grad_norm=0.1)
    out = base(**batch, output_hidden_states=True)
    loss = updater.step(out.hidden_states, out.logits, batch["input_ids"], attention_mask=batch["attention_mask"],
                        labels=labels)  # fmt: skip

    expected.train().draw_seed = 0
    trained = [p for p in expected.head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    own = expected(**batch, labels=labels).loss
    own.backward()
    nn.utils.clip_grad_norm_(trained, 0.1)
    optimizer.step()
    assert loss == pytest.approx(own.item(), rel=1e-4)
    assert same(weights_of(model.head), weights_of(expected.head), 5e-4) and not model.head.training
    assert all(p.grad is None and p.equal(before[name]) for name, p in base.named_parameters())


def test_states_and_logits_may_come_in_any_form():
    model = float_model("eagle3")
    base, batch = policy_of(model), padded(TEXTS)
    out = base(**batch, output_hidden_states=True)
    states, mask = out.hidden_states, batch["attention_mask"]
    forms = [
        (states, out.logits), (states, None), (dict(enumerate(states)), None),
        (torch.cat([states[k] for k in model.head.layers], -1), out.logits),
    ]  # fmt: skip
    results = []
    for hidden_states, logits in forms:
        head = copy.deepcopy(model.head)
        HeadUpdater(head, base).step(hidden_states, logits, batch["input_ids"], attention_mask=mask)
        results.append(weights_of(head))
    assert all(same(results[0], other, 1e-5) for other in results[1:])
    with pytest.raises(ValueError, match="give logits"):
        HeadUpdater(model.head, base).step(forms[3][0], None, batch["input_ids"])
    with pytest.raises(ValueError, match="the head reads hidden states"):
        HeadUpdater(model.head, base).step(states[:2], out.logits, batch["input_ids"])


def test_costs_are_bounded_and_every_row_and_part_is_learnt_in_time():
    model = float_model("medusa")
    base = policy_of(model)
    ids = torch.arange(90).view(3, 30)  # a token's number says its row and column
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :10] = 0
    with torch.no_grad():
        out = base(ids, attention_mask=mask, output_hidden_states=True)
    labels = torch.where(mask.bool() & (torch.arange(30) >= 12), ids, -100)
    updater = HeadUpdater(model.head, base, every=3, max_tokens=18)
    seen, trained = torch.zeros(90, dtype=torch.bool), 0
    for call in range(90):
        assert updater.due == (call % 3 == 0)
        if updater.due:
            sample = updater.sample(out.hidden_states, None, ids, attention_mask=mask, labels=labels)
            assert sample.tokens.numel() <= 18 and sample.supervised.any()
            seen[sample.tokens[sample.supervised]] = True
        loss = updater.step(out.hidden_states, None, ids, attention_mask=mask, labels=labels)
        trained += loss is not None
    assert trained == 30 == updater.updates and seen.view(3, 30).equal(labels != -100)
    assert updater.step(out.hidden_states, None, ids, labels=torch.full_like(ids, -100)) is None
    for options in ({"every": 0}, {"max_tokens": 4}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            HeadUpdater(model.head, base, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one(dtype):
    model = float_model("eagle3")
    base, start = policy_of(model), model.head.to(dtype)
    ids = padded(TEXTS)["input_ids"]
    out = base(ids, output_hidden_states=True)

    def steps(updater, count):
        for _ in range(count):
            updater.step(out.hidden_states, out.logits, ids)
        return updater

    options = {"every": 2, "learning_rate": 1e-5, "max_tokens": 20}  # a rate that bfloat16 weights would round away
    whole = steps(HeadUpdater(copy.deepcopy(start), base, **options), 12)
    half, file = steps(HeadUpdater(copy.deepcopy(start), base, **options), 5), io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = HeadUpdater(copy.deepcopy(start), base, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert same(weights_of(half.head), weights_of(resumed.head))
    assert same(weights_of(whole.head), weights_of(steps(resumed, 7).head)) and resumed.updates == 6
    changed = [(whole.weights[name] != p.float()).float().mean() for name, p in start.named_parameters()]
    assert sum(changed) / len(changed) > 0.9 and whole.head.dtype == dtype
    other = float_model("medusa")
    with pytest.raises(ValueError, match="the state of another head"):
        resumed.load_state_dict(HeadUpdater(other.head, base).state_dict())


def test_a_followed_head_accepts_more_than_a_frozen_one_as_the_policy_moves():
    model = learnt("eagle3")
    base, frozen = policy_of(model), copy.deepcopy(model.head)
    torch.manual_seed(1)
    target = torch.randint(3, 97, (3, 24))  # what the policy learns to write
    updater = HeadUpdater(model.head, base, every=1, learning_rate=1e-2)
    observed = Observed(updater)
    observed.install()
    optimizer = torch.optim.AdamW(base.parameters(), lr=5e-3)
    ids = torch.cat([torch.tensor([[5, 6], [50, 9], [33, 34]]), target], 1)
    for _ in range(40):
        observed.arm()
        base(ids, labels=ids).loss.backward()
        updater.learn(observed.take())
        optimizer.step()
        optimizer.zero_grad()
    observed.remove()
    lengths = {}
    for name, head in (("frozen", frozen), ("followed", model.head)):
        model.head = head.eval()
        out = model.generate(ids[:, :2], draft="head", do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
        lengths[name] = out.statistics()["accepted_length"]
    assert updater.updates == 40 and lengths["followed"] > lengths["frozen"] + 0.5, lengths


@pytest.mark.parametrize("taps", [(1, 2, 4), (0, 3, 5)], ids=["usual", "embeddings-and-before-the-norm"])
def test_a_training_pass_is_observed_and_stays_as_it_is(taps):
    model = float_model("eagle3", taps=taps)
    base, batch = policy_of(model), padded(TEXTS)
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    plain = base(**batch, labels=labels)
    features, *_ = model.observe_base(batch["input_ids"], batch["attention_mask"],
                                     (batch["attention_mask"].cumsum(1) - 1).clamp_min(0), None)  # fmt: skip
    updater = HeadUpdater(model.head, base)
    observed = Observed(updater)
    observed.install()
    base.train()
    base.gradient_checkpointing_enable()
    assert observed.take() is None
    observed.arm()
    with torch.no_grad():
        base(**batch)
    assert observed.armed
    out = base(**batch, labels=labels)
    sample = observed.take()
    assert torch.allclose(out.loss, plain.loss) and out.hidden_states is None
    out.loss.backward()  # recomputes the layers
    assert observed.take() is None
    for row, text in enumerate(sample.tokens.tolist()):
        b = next(b for b, one in enumerate(TEXTS) if one[:2] == text[:2])
        width = len(TEXTS[b])
        assert torch.allclose(sample.features[row, :width], features[b, -width:], atol=1e-4)
        assert sample.supervised[row].tolist() == [c < width for c in range(sample.tokens.shape[1])]
    observed.remove()
    hooks = [h for m in base.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not [hook for hook in hooks if "Observed" in getattr(hook, "__qualname__", "")]


def test_a_base_whose_layers_return_something_else_is_refused(monkeypatch):
    model = float_model("eagle3")
    base = policy_of(model)
    observed = Observed(HeadUpdater(model.head, base))
    monkeypatch.setattr(
        "specheads.training.observed.decoder_layers", lambda base: nn.ModuleList([*base.model.layers][::-1])
    )
    with pytest.raises(ValueError, match="is not what it gives as hidden states"):
        observed.install()
    assert not base._forward_pre_hooks and not base.model._forward_hooks
