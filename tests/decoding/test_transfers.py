"""The host reads one tensor a step, and asks for nothing else that depends on values: a GPU would make it wait."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specheads import BestFirstTree, DynamicTree, chain, comb
from specheads.decoding import loop
from tests.reference.slow_heads import KINDS
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.prompts import PROMPTS, padded

TREES = {"chain": chain(3), "comb": comb(3, 2), "dynamic": DynamicTree(8, 3, 3), "best first": BestFirstTree(8, 3, 3)}
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
# Operations whose result has a shape, or a value on the host, that depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "repeat_interleave.Tensor", "equal")


class Watch(TorchDispatchMode):
    """Counts operations that make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if name.startswith(WAITS):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def reads_of_steps(monkeypatch, model, **options):
    """What the host read in each step of a text, by name."""
    watch, steps, step = Watch(), [], loop._Loop.step

    def watched(self, **options):
        watch.seen.clear()
        with watch:
            result = step(self, **options)
        steps.append(list(watch.seen))
        return result

    def counting(name, method):
        def read(self, *args, **kwargs):
            watch.seen.append(name)
            return method(self, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "step", watched)
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        model.generate(**options, max_new_tokens=16)
    return steps


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 40, "seed": 2}], ids=("0", "T")
)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_one_tensor(kind, tree, sampling, monkeypatch):
    model = spec_model(kind)
    model.base.generation_config.eos_token_id = None
    for prompts in (padded(PROMPTS[:1]), padded(PROMPTS)):
        steps = reads_of_steps(monkeypatch, model, **prompts, tree=TREES[tree], **sampling)
        # The first step may look at the shape of the trees, once for all texts; the last ones have shorter trees.
        assert [step for step in steps[1:-3] if step != ["tolist"]] == []


def test_the_watch_sees_a_step_that_reads_more(monkeypatch):
    model = spec_model("medusa")
    steps = reads_of_steps(monkeypatch, model, **padded(PROMPTS[:1]), repetition_penalty=1.2)
    assert all(len(step) > 1 for step in steps)
