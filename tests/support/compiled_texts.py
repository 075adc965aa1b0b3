"""What the tests of compiled steps share."""

import shutil

import pytest
import torch

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
def fresh_dynamo():
    torch._dynamo.reset()
