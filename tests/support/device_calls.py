"""Decodes and trains on the second device and on the CPU, and ends in an error where they differ.

python -m tests.support.device_calls decode FIRST LAST  # calls drawn at random, by their seeds
python -m tests.support.device_calls train KIND
python -m tests.support.device_calls spread KIND  # the base's first half on the device, the rest on the CPU: both
"""

import copy
import itertools
import sys

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

import specheads
from specheads import DraftModel
from specheads.decoding.drafters.auto import AutoDrafter
from specheads.models.checkpoint import build_head
from tests.reference.slow_heads import shallow_spec_model
from tests.support import random_calls
from tests.support.child_end import report_done
from tests.support.prompts import PROMPTS, padded
from tests.support.second_device import DEVICE, host, on_device, place
from tests.support.tiny_models import near


def drafter(call, texts, move):
    """The drafter of a call, its models as `move` returns them. texts: those of each row, which may be drafted."""
    kind, _, rest = call.draft.partition(" ")
    if kind == "model":
        return DraftModel(move(near(random_calls.base_named(call.base), 0.02)))
    if kind == "head":
        return move(random_calls.head_named(call.base, rest))
    if kind == "auto":
        head, costs = rest.split()
        found = None if head == "alone" else move(random_calls.head_named(call.base, head))
        return AutoDrafter(found, random_calls.COSTS[costs])
    return call.drafter(texts)


def decode(seed):
    """One call on both. Half of them take the steps that compile, which run as they are."""
    call = random_calls.draw(seed)
    base = random_calls.base_named(call.base)
    plain = specheads.generate(base, **call.inputs, **call.options)
    blank = call.inputs["attention_mask"].logical_not().sum(1).tolist()
    texts = [row[start:].tolist() for row, start in zip(plain, blank, strict=True)]

    def text(move):
        inputs = {name: move(tensor) for name, tensor in call.inputs.items()}
        return specheads.generate(
            move(base), **inputs, **call.options, draft=drafter(call, texts, move), tree=call.tree, accept=call.accept,
            compile="eager" if seed % 2 else False,
        )  # fmt: skip

    expected, found = text(lambda value: value), text(on_device)
    assert found.device == DEVICE and torch.equal(host(found), expected), call


def spread(model):
    """A copy whose base begins on the device and ends on the CPU, as `device_map` spreads one, and the head beside it
    where it is built."""
    model = copy.deepcopy(model)
    base, layers = model.base, model.base.model.layers
    first, last = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    parts = {
        base.model.embed_tokens: DEVICE,
        base.model.rotary_emb: DEVICE,
        base.model.norm: "cpu",
        base.lm_head: "cpu",
    }
    for module, device in (parts | dict.fromkeys(first, DEVICE) | dict.fromkeys(last, "cpu")).items():
        if device == DEVICE:
            place(module)
        add_hook_to_module(module, AlignDevicesHook(device))
    add_hook_to_module(base, AlignDevicesHook(DEVICE, io_same_device=True))
    assert next(build_head(model.head.config, base).parameters()).device == DEVICE
    place(model.head)
    return model


def decode_spread(kind):
    model, inputs = shallow_spec_model(kind), padded(PROMPTS)
    moved, moved_inputs = spread(model), {name: on_device(tensor) for name, tensor in inputs.items()}
    for options in ({}, {"draft": "head"}, {"draft": "lookup"}, {"draft": "head", "do_sample": True, "seed": 2}):
        options = {"do_sample": False, "max_new_tokens": 14, **options}
        found, expected = moved.generate(**moved_inputs, **options), model.generate(**inputs, **options)
        assert torch.equal(host(found), expected), (kind, options)


def train(kind, move_model):
    """Losses and gradients of rows as they are, of packed ones and of padded ones."""
    model = shallow_spec_model(kind)
    ids = torch.randint(3, model.base.config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids, "labels": torch.where(torch.arange(24) < 5, -100, ids)}
    forms = (
        {}, {"document_ids": torch.tensor([[1] * 10 + [2] * 10 + [0] * 4] * 3)},
        {"attention_mask": torch.tensor([[1] * 24, [1] * 20 + [0] * 4, [0] * 6 + [1] * 18])},
    )  # fmt: skip
    for form, training in itertools.product(forms, (True, False)):
        model.zero_grad()
        moved = move_model(model.train(training))
        for each, move in ((model, lambda value: value), (moved, on_device)):
            each.draw_seed = 5
            each(**{name: move(tensor) for name, tensor in (rows | form).items()}).loss.backward()
        found = dict(moved.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    host(found[name].grad), parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
                )


def check_that_it_refuses():
    tensor, numbers = on_device(torch.zeros(3)), torch.ones(3)
    refused = (
        lambda: tensor + numbers, lambda: torch.cat([numbers, tensor]), lambda: numbers[tensor.long()],
        lambda: tensor.numpy(),
    )  # fmt: skip
    for operation in refused:
        with pytest.raises((RuntimeError, TypeError), match="second"):
            operation()
    assert host(tensor + numbers[0] + tensor.to("cpu").to(DEVICE)).tolist() == [1, 1, 1]


if __name__ == "__main__":
    check_that_it_refuses()
    torch.set_num_threads(1)
    torch.compile = lambda function, **options: function
    what, *rest = sys.argv[1:]
    if what == "train":
        train(*rest, on_device)
    if what == "spread":
        decode_spread(*rest)
        train(*rest, spread)
    for seed in range(*map(int, rest)) if what == "decode" else ():
        try:
            decode(seed)
        except pytest.skip.Exception as reason:
            print(f"{seed}: {reason}")
        except Exception as error:
            raise AssertionError(random_calls.draw(seed)) from error
    report_done()
