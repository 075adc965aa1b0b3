"""Ensemble: transformers' own assistant_ensemble_weight, and the mixture's distribution where tokens are drawn."""

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from specheads import DraftModel, Ensemble, SampledTree, StaticTree, chain, generate
from tests.reference.enumeration import Table, distance, step_probs
from tests.support.tiny_models import tiny_llama

DEPTH = 4


@pytest.fixture(scope="module")
def pair():
    base, small = tiny_llama(eos_token_id=None, pad_token_id=None), tiny_llama(eos_token_id=None, pad_token_id=None)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(torch.randn_like(weight) * 0.05 * weight.std(correction=0))
    small.generation_config.num_assistant_tokens = DEPTH
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0
    return base, small


@pytest.mark.parametrize("weight", [0.9, 0.5, 0.3])
@pytest.mark.sampled(3)
def test_greedy_text_is_that_of_transformers_under_the_same_weight(pair, weight):
    base, small = pair
    changed = 0
    for prompt in ([5, 6, 7, 8], [44], [9, 3, 2, 7, 5, 5]):
        ids = torch.tensor([prompt])
        ours = generate(
            base, ids, attention_mask=torch.ones_like(ids), draft=DraftModel(small), tree=chain(DEPTH),
            accept=Ensemble(weight), max_new_tokens=40, do_sample=False,
        )  # fmt: skip
        # Our prefill gives a token and theirs none: theirs begins after it, so that drafts have the same positions.
        begun = ours[:, : ids.shape[1] + 1]
        ask = {"attention_mask": torch.ones_like(begun), "max_new_tokens": 39, "do_sample": False}
        theirs = base.generate(begun, assistant_model=small, assistant_ensemble_weight=weight, **ask)
        # Their last draft is cut to what is still wanted, and the token after a draft is the target's own.
        assert torch.equal(ours[:, :-DEPTH], theirs[:, :-DEPTH])
        changed += not torch.equal(ours[:, :-DEPTH], base.generate(begun, **ask)[:, :-DEPTH])
    assert changed  # the weight matters here


def test_a_drawn_token_has_the_distribution_of_the_mixture():
    target, draft = Table(4, 0), Table(4, 1)
    for plan in (chain(1), StaticTree(((0,), (1,), (2,))), SampledTree((1,)), SampledTree((2,))):
        probs = step_probs(target, draft, plan, Ensemble(0.6), (1, 2))
        first = {(token,): 0.0 for token in range(4)}
        for tokens, chance in probs.items():
            first[tokens[:1]] += chance
        v = 0.6 * target((1, 2)).softmax(-1) + 0.4 * draft((1, 2)).softmax(-1)
        assert distance(first, {(i,): chance for i, chance in enumerate(v.tolist())}) < 1e-12


def test_the_token_after_a_whole_draft_has_the_targets_distribution():
    for plan in [chain(1), SampledTree((1,)), SampledTree((2,))]:
        target, draft = Table(4, 0), Table(4, 1)
        whole = {
            k: chance for k, chance in step_probs(target, draft, plan, Ensemble(0.6), (1, 2)).items() if len(k) == 2
        }
        assert whole
        for token in {tokens[0] for tokens in whole}:
            after = {tokens[1:]: chance for tokens, chance in whole.items() if tokens[0] == token}
            p = target((1, 2, token)).softmax(-1).tolist()
            assert distance(after, {(i,): sum(after.values()) * chance for i, chance in enumerate(p)}) < 1e-12


def test_what_a_processor_rules_out_for_the_target_is_not_emitted_whatever_the_draft_gives_it():
    for plan in [chain(1), SampledTree((1,)), SampledTree((2,))]:
        target, draft = Table(4, 0), Table(4, 1)
        processors = LogitsProcessorList([TopKLogitsWarper(2)])
        p, q = (processors(None, table((1, 2)).unsqueeze(0))[0].softmax(-1) for table in (target, draft))
        assert (q[p == 0] > 0).any()
        v = (0.6 * p + 0.4 * q) * (p > 0)
        first = {(token,): 0.0 for token in range(4)}
        for tokens, chance in step_probs(target, draft, plan, Ensemble(0.6), (1, 2), processors=processors).items():
            first[tokens[:1]] += chance
        assert distance(first, {(i,): chance for i, chance in enumerate((v / v.sum()).tolist())}) < 1e-12


def test_weight_1_is_lossless_and_weights_outside_are_refused():
    assert Ensemble(1.0).lossless and not Ensemble(1.0).requires_draft_probs and not Ensemble(0.9).lossless
    for weight in (0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="weight="):
            Ensemble(weight)
