"""What the tests of compiled steps share."""

import shutil

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.backends.registry import lookup_backend

from specheads import generate
from tests.reference.slow_heads import shallow_spec_model as spec_model

needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
DRAWING = {"do_sample": True, "temperature": 0.8, "seed": 5}


def texts_of(model, prompts, **options):
    """The text without and with compiled steps."""
    options = {"max_new_tokens": 14, "do_sample": False} | options
    call = generate if not hasattr(model, "head") else type(model).generate
    return [call(model, **prompts, **options, compile=compile).tolist() for compile in (False, "eager")]


def endless(kind):
    """A head on a base of few layers, whose text does not end."""
    model = spec_model(kind)
    model.base.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    """Nothing compiled before; and a graph's inputs must lie in memory as those that it was compiled for, since nothing
    in it asks."""
    torch._dynamo.reset()
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", with_layouts)


def with_layouts(graph, inputs):
    """The backend "eager", whose code refuses inputs of another layout than at its first call."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    first = []

    def run(*given):
        layouts = [layout(value) for value in given]
        first.extend([] if first else layouts)
        for name, expected, found in zip(names, first, layouts, strict=True):
            assert found == expected, f"{name} is {found}, and was {expected} when it was compiled"
        return graph.forward(*given)

    return run


def layout(value):
    """Of a tensor: how many elements there are along each dimension, how far apart, and of which type."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    steps = [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    return value.dtype, tuple(value.shape), tuple(steps)


vars(with_layouts).update(vars(lookup_backend("eager")))  # torch 2.13 keeps a backend's tags there, 2.15 not
