"""Automatic drafts and refilled batches in compiled steps: the text is the one without compiling.

The backend "eager" traces as torch's own does, with no graph break allowed, and runs the operations as they are.
"""

import pytest
import torch

from specheads import SampledTree, chain, convert
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.drafters import AutoDrafter
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts, step_planner
from specheads.decoding.planner.by_cost.step_planner import Choice
from tests.reference.slow_heads import KINDS
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import fresh_dynamo, texts_of  # noqa: F401
from tests.support.families import RECURRENT, build
from tests.support.prompts import PROMPTS, padded

NOTHING = Curve(((1, 0.0),))
CHEAP_HEAD = StepCosts(1, {64: Curve(((1, 4.0), (64, 12.0)))}, NOTHING, NOTHING, NOTHING, NOTHING)
HEAD_IS_CHEAP = CostTable(None, {1: CHEAP_HEAD})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5}], ids=("greedy", "drawn"))
def test_automatic_drafts_take_few_graphs_and_give_the_same_text(sampling):
    model = spec_model("eagle3")
    model.base.generation_config.eos_token_id = None
    prompts, sampling = padded(PROMPTS), {"max_new_tokens": 28, **sampling}
    without, compiled = texts_of(model, prompts, draft=AutoDrafter(model.head, HEAD_IS_CHEAP), **sampling)
    assert compiled == without == model.generate(**prompts, draft=False, **({"do_sample": False} | sampling)).tolist()
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None and not steps.failures
    functions = [function.__name__ for function, _ in steps._known]
    assert {"whole_step"} <= set(functions) <= {"whole_step", "step_after_draft"} and len(functions) <= 8


def test_a_step_that_drafts_nothing_is_one_graph():
    costs = StepCosts(1, {64: Curve(((1, 4.0), (2, 400.0)))}, NOTHING, NOTHING, Curve(((1, 400.0),)), NOTHING)
    model = spec_model("eagle3")
    drafter = AutoDrafter(model.head, CostTable(None, {1: costs}))
    without, compiled = texts_of(model, padded(PROMPTS), draft=drafter, max_new_tokens=12)
    assert compiled == without
    assert [function.__name__ for function, _ in compiled_steps(model.base, "eager")._known] == ["whole_step"]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=("three rows", "one"))
def test_automatic_drafts_of_a_hybrid_target_are_chains_in_the_graph(prompts, monkeypatch):
    monkeypatch.setattr(step_planner, "choose", fickle)
    fickle.calls = 0
    model = convert(build(*RECURRENT["LFM2"]), "eagle3")
    model.base.generation_config.eos_token_id = None
    drafter, options = AutoDrafter(model.head, HEAD_IS_CHEAP), {"max_new_tokens": 20, "do_sample": False}
    without, compiled = texts_of(model, padded(prompts), draft=drafter, **options)
    assert compiled == without == model.generate(**padded(prompts), **options, draft=False).tolist()
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None and not steps.failures and len(steps) > 2


def fickle(candidates, head_gains, copy_gains, step_ms, draft_ms, value):
    """A choice that changes at each step: nothing, the longest copies, or one of the head's chains, beside copies."""
    rows = len(copy_gains)
    if not candidates.chains:
        return Choice(0, 1, (False,) * rows, rows, 9.0)
    fickle.calls += 1
    depth = candidates.chains[fickle.calls // 4 % len(candidates.chains)]
    if (kind := fickle.calls % 4) < 2:
        return Choice(0, candidates.sizes[-1] if kind else 1, (bool(kind),) * rows, rows, 1.0)
    return Choice(depth, 1 + depth, tuple(rows > 1 and (b + fickle.calls) % 3 == 0 for b in range(rows)), rows, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5}], ids=("greedy", "drawn"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_misses_steps_drafts_in_the_graph(kind, sampling, monkeypatch):
    monkeypatch.setattr(step_planner, "choose", fickle)
    fickle.calls, model = 0, spec_model(kind)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 97} | sampling
    prompts = padded(PROMPTS if sampling else PROMPTS[:1])
    plain = model.generate(**prompts, **options, draft=False)
    for compile in (False, "eager"):
        out = model.generate(**prompts, **options, draft=AutoDrafter(model.head, HEAD_IS_CHEAP), compile=compile)
        assert torch.equal(out, plain)
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None and not steps.failures
    graphs = [key for function, key in steps._known if function.__name__ == "whole_step"]
    reads_what_it_missed = kind.startswith("eagle")
    assert len(graphs) >= 2 + reads_what_it_missed, "of the head's shapes, and in both widths"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("draft", "accept", "tree"),
    [
        (True, None, None), ("lookup", None, None), (False, None, None), (True, "typical:0.3", chain(3)),
        (True, None, SampledTree((2, 2, 1))),
    ],
)  # fmt: skip
def test_a_refilled_batch_gives_each_prompt_its_own_text(draft, accept, tree):
    model = spec_model("eagle3")
    prompts = [[*PROMPTS[i % 3], 3 + i] for i in range(7)]
    options = {"max_new_tokens": 12, "batch_size": 2, "draft": draft, "do_sample": True, "seed": 3}
    options |= {"accept": accept, "tree": tree} if tree else {}
    without, compiled = (model.generate_many(prompts, **options, compile=compile) for compile in (False, "eager"))
    assert [one.tokens for one in compiled] == [one.tokens for one in without]
    assert len(compiled_steps(model.base, "eager")) == 1
