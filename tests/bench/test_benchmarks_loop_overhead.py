"""benchmarks/loop_overhead.py splits the time of the steps alone, of the head's own drafts."""

import functools
import time

import pytest
import torch

from benchmarks import loop_overhead
from specheads.models.convert import convert
from tests.support.tiny_models import tiny_llama


def test_shares_are_of_the_steps_of_the_head_without_the_prompt(monkeypatch):
    model = convert(tiny_llama(num_hidden_layers=2), "medusa", num_heads=2)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    forward = model.base.forward

    @functools.wraps(forward)
    def slow_prompt(*args, **kwargs):
        if any(isinstance(one, torch.Tensor) and one.shape[:2] == ids.shape for one in (*args, *kwargs.values())):
            time.sleep(0.5)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.base, "forward", slow_prompt)
    found = loop_overhead.measured(model, batch, 12, 1)
    assert 0 < found["base_share"] < 1 and 0 < found["head_share"] < 1 and 0 < found["loop_share"] < 1
    assert found["base_share"] + found["head_share"] + found["loop_share"] == pytest.approx(1)
    steps = model.generate(**batch, draft="head", max_new_tokens=12, return_dict_in_generate=True).steps
    assert (found["steps"], found["tree_nodes"]) == (len(steps) - 1, 1 + steps[1].drafted[0])
    assert 1e3 * found["step_seconds"] * found["steps"] < 500 and found["largest_read"] < 97
