"""Calls of generate() with options drawn at random give the base's own greedy text, or a seed's text of plain decoding.

Other tests ask of each option by itself. Here options meet that nobody thought of together; a seed that fails is the
number in the test's name.
"""

import pytest
import torch

import specheads
from tests.support.random_calls import base_named, draw, draw_many

OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("seed", range(600))
@pytest.mark.sampled(15)
def test_random_options_leave_the_text(seed):
    call = draw(seed)
    base, options = base_named(call.base), call.options
    expected = None
    if not options["do_sample"]:
        expected = base.generate(**call.inputs, **options, **OUTPUTS)
    # In float64 transformers' own Gemma-2 gives NaN for rows with much padding.
    if expected is None or any(bool(logits.isnan().any()) for logits in expected.logits):
        expected = specheads.generate(base, **call.inputs, **options, **OUTPUTS)
    blank = call.inputs["attention_mask"].logical_not().sum(1).tolist()
    texts = [row[start:].tolist() for row, start in zip(expected.sequences, blank, strict=True)]
    drafted = {"draft": call.drafter(texts), "tree": call.tree, "accept": call.accept, "compile": call.compile}
    outputs = OUTPUTS if call.outputs else {"return_dict_in_generate": True}
    out = specheads.generate(base, **call.inputs, **options, **drafted, **outputs)
    assert torch.equal(out.sequences, expected.sequences), call
    if call.outputs:
        for row in range(len(call.rows)):
            length = sum(len(step.tokens[row]) for step in out.steps)
            for given, wanted in ((out.logits, expected.logits), (out.scores, expected.scores)):
                ours, theirs = (torch.stack([level[row] for level in levels[:length]]) for levels in (given, wanted))
                # States of recurrent layers are float32, whatever the model is.
                torch.testing.assert_close(ours, theirs, rtol=3e-3, atol=1e-3, msg=lambda text: f"{call}: {text}")


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.sampled(15)
def test_each_of_many_prompts_has_the_text_that_it_has_alone(seed):
    call = draw_many(seed)
    base, limits = base_named(call.base), call.options.pop("max_new_tokens")
    drafted = {"draft": call.drafter(None), "tree": call.tree, "accept": call.accept, "compile": call.compile}
    found = specheads.generate_many(base, call.rows, max_new_tokens=limits, **call.options, **drafted)
    assert [one.prompt for one in found] == call.rows
    alone = {name: value for name, value in call.options.items() if name != "batch_size"}
    for limit, one in zip(limits, found, strict=True):
        options = alone | {"max_new_tokens": limit, "seed": one.seed}
        expected = specheads.generate(base, torch.tensor([one.prompt]), **options)
        assert [*one.prompt, *one.tokens] == expected[0].tolist(), (call, one.index)
