"""Bases whose rotary positions depend on the length: the text is generate()'s before, at and beyond the boundary."""

import pytest
import torch
from transformers import LlamaForCausalLM

import specheads
from specheads import DraftModel, DynamicTree, PromptLookup, SampledTree, UnsupportedModel, convert
from tests.support.families import build, skip_where_transformers_loses_the_cache
from tests.support.prompts import padded
from tests.support.tiny_models import tiny_llama

BOUNDARY = 40
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 7.0, 5.0, 9.0],
    "original_max_position_embeddings": BOUNDARY, "factor": 4.0,
}  # fmt: skip
BASES = {
    # Reads its whole text again where it crosses, by its own prepare_inputs_for_generation.
    "Phi-3, longrope": lambda: build("Phi3Config", {
        "rope_parameters": LONG, "max_position_embeddings": 160, "original_max_position_embeddings": BOUNDARY,
        "sliding_window": None,
    }),
    "Llama, longrope": lambda: tiny_llama(rope_parameters=LONG, max_position_embeddings=160, eos_token_id=None),
    "Llama, dynamic": lambda: tiny_llama(
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        max_position_embeddings=BOUNDARY, eos_token_id=None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def base(request):
    base = BASES[request.param]()
    base.generation_config.eos_token_id = None
    skip_where_transformers_loses_the_cache(base, BOUNDARY)
    return base


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return padded([torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths])


def drafters(base):
    return {
        "plain": None, "itself": DraftModel(base), "lookup": PromptLookup(6, width=2),
        "eagle3": convert(base, "eagle3").head, "medusa": convert(base, "medusa", num_heads=3).head,
    }  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("lengths", [(30,), (38,), (40,), (41,), (60,), (30, 22, 5), (40, 12), (39, 45)], ids=str)
def test_the_text_is_generates_own_on_both_sides(base, lengths):
    inputs, options = prompts(*lengths), {"do_sample": False, "max_new_tokens": 30}
    base(torch.tensor([[1]]))  # without it `dynamic` begins with the frequencies of the text before it
    expected = base.generate(**inputs, **options)
    for name, drafter in drafters(base).items():
        if name == "itself" and max(lengths) >= base.config.max_position_embeddings:
            continue  # a draft model takes no longer prompts than its config names
        tree = DynamicTree(10, 4, 3) if name in ("itself", "eagle3") else None
        out = specheads.generate(base, **inputs, **options, draft=drafter, tree=tree)
        assert torch.equal(out, expected), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(4)
def test_rows_that_end_early_change_nothing_for_the_others(base, seed):
    """The longest row's positions count for all, after its end as well."""
    inputs = prompts(33, 24, 28)
    free = base.generate(**inputs, do_sample=False, max_new_tokens=30)[:, 33:]
    ends = [int(free[0, 2 + seed]), int(free[1, 12]), int(free[2, 4])]  # each row at its own position
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": 0}
    expected = base.generate(**inputs, **options)
    for name, drafter in drafters(base).items():
        assert torch.equal(specheads.generate(base, **inputs, **options, draft=drafter), expected), name


def test_drafting_stops_and_resumes_as_it_can_and_warns_once(base, hf_log):
    inputs = prompts(32)
    long = "longrope" in str(base.config.rope_parameters)
    text = base.generate(**inputs, do_sample=False, max_new_tokens=40)
    out = specheads.generate(
        base, **inputs, do_sample=False, max_new_tokens=40, draft=DraftModel(base), tree=specheads.chain(4),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, text)
    at, drafted = 33, []
    for step in out.steps[1:]:
        drafted.append((at, step.drafted[0]))
        at += len(step.tokens[0])
    assert all(n == 4 for at, n in drafted if at + 4 <= BOUNDARY)
    assert all(n == 0 for at, n in drafted if at - 1 < BOUNDARY < at + 4)
    beyond = [n for at, n in drafted if at - 1 >= BOUNDARY and at < 66]
    assert beyond and all((n == 4) == long for n in beyond)
    warnings = [record.message for record in hf_log.records if "rotary positions" in record.message]
    assert len(warnings) == 1 and f"at {BOUNDARY} tokens" in warnings[0]


def test_a_text_that_ends_before_the_boundary_is_drafted_for_as_any_other(base, hf_log):
    inputs = prompts(12)
    out = specheads.generate(
        base, **inputs, do_sample=False, max_new_tokens=14, draft=DraftModel(base), tree=specheads.chain(4),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.statistics()["accepted_length"] > 3 and "rotary positions" not in hf_log.text


@pytest.mark.sampled(3)
def test_sampled_text_crosses_the_boundary_by_the_same_draws(base):
    """A point mass is walked by the draws of plain decoding, so a seed's text is that of no drafts."""
    inputs, options = prompts(34), {"do_sample": True, "max_new_tokens": 20, "top_k": 20}
    for seed in range(4):
        plain = specheads.generate(base, **inputs, **options, seed=seed)
        assert torch.equal(specheads.generate(base, **inputs, **options, seed=seed, draft=PromptLookup(5)), plain)
        drawn = specheads.generate(
            base, **inputs, **options, seed=seed, draft=DraftModel(base), tree=SampledTree((2, 1))
        )
        assert drawn.shape == plain.shape


def test_a_text_with_explicit_positions_is_not_read_again():
    base = BASES["Phi-3, longrope"]()
    inputs = prompts(30)
    position = torch.arange(30).unsqueeze(0) + 3
    with pytest.raises(UnsupportedModel, match="reads its text again at 40 tokens"):
        specheads.generate(base, **inputs, position_ids=position, do_sample=False, max_new_tokens=20)
    out = specheads.generate(base, **inputs, position_ids=position, do_sample=False, max_new_tokens=5)
    assert torch.equal(out, base.generate(**inputs, position_ids=position, do_sample=False, max_new_tokens=5))


def test_other_rotary_positions_do_not_depend_on_the_length():
    base = tiny_llama()
    assert isinstance(base, LlamaForCausalLM)
    target = specheads.decoding.verify.causal.Target(base)
    target.prefill(torch.tensor([[5, 6]]), torch.tensor([2]), room=3)
    assert target.switch is None
