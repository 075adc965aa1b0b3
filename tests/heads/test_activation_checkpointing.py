"""Activation checkpointing of heads: the same loss and gradients, fewer tensors kept, by transformers' own switch."""

import pytest
import torch

from specheads.data.datasets import Collator
from specheads.models.convert import convert
from tests.reference.slow_heads import KINDS, rows
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.tiny_models import tiny_llama
from tests.support.trainers import SWITCHES, model_of, same, trainer_of, weights

HEADS = [
    *((kind, {}) for kind in KINDS),
    ("hydra", {"prefix_layer": True}),
    ("eagle3", {"num_layers": 2, "anchors": 4}),
    ("mtp", {"num_modules": 2, "anchors": 4}),
]


def step(model, batch):
    """Loss and gradients, and the bytes that the backward pass was kept."""
    kept = 0

    def weigh(tensor):
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        loss = model(**batch).loss
    grads = torch.autograd.grad(loss, [p for p in model.head.parameters() if p.requires_grad])
    return [loss.detach(), *grads], kept


@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_recomputed_blocks_give_the_same_gradients_and_keep_less(kind, options):
    model, batch = spec_model(kind, **options).train(), Collator(0)(rows(40, 30))
    plain, kept = step(model, batch)
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    again, less = step(model, batch)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert less < kept * 0.8
    model.activation_checkpointing_disable()
    assert step(model, batch)[1] == kept and not model.is_activation_checkpointing


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("kind", ["hydra", "eagle3"])
def test_the_trainers_switch_trains_to_the_same_weights(kind, name, tmp_path):
    runs = []
    for switch in (False, True):
        trainer = trainer_of(tmp_path, model_of(kind), **{name: switch})
        trainer.train()
        assert trainer.model.is_activation_checkpointing is switch
        runs.append(weights(trainer.model))
    assert same(*runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=true"),
        ({"every_n_layers": 2}, "every_n_layers=2, offload=False: heads recompute every block or none"),
        ({"offload": True}, "offload=True"),
    ],
)
def test_what_heads_do_not_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        model_of("eagle").activation_checkpointing_enable(**options)
    joint = convert(tiny_llama(num_hidden_layers=2), "medusa", lora={})
    with pytest.raises(ValueError, match="a base with adapters stores more"):
        joint.activation_checkpointing_enable()


@pytest.mark.filterwarnings("error")
def test_the_names_before_transformers_5_23_do_the_same():
    model = model_of("eagle")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"preserve_rng_state": False})
    assert model.head.checkpointing == {"preserve_rng_state": False} and model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert model.head.checkpointing is None and not model.is_gradient_checkpointing
