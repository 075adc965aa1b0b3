"""What compiled steps allocate: no copy of a cache, however long the text may become."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from specheads import PromptLookup
from specheads.decoding.compiled import compiled_steps
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import fresh_dynamo  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("draft", [False, "head", PromptLookup(3)])
def test_a_compiled_step_copies_no_cache(draft):
    model, ids = spec_model("eagle3"), torch.arange(8 * 20).view(8, 20) * 7 % 97

    def large_allocations(tokens: int) -> int:
        options = {"draft": draft, "do_sample": False, "compile": True}
        model.generate(ids, max_new_tokens=tokens, **options)  # what is not compiled yet
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            model.generate(ids, max_new_tokens=tokens, **options)
        events = record.profiler.kineto_results.events()
        return sum(event.name() == "[memory]" and event.nbytes() >= layer_keys for event in events)

    text = model.base.config.get_text_config()
    width = text.hidden_size // text.num_attention_heads
    layer_keys = 8 * text.num_key_value_heads * 256 * width * model.base.dtype.itemsize
    assert large_allocations(8) == large_allocations(60) > 0
    assert compiled_steps(model.base).failure is None
