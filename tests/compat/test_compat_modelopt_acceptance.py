"""ModelOpt's acceptance rates: what its validators count."""

import pytest
import torch

from specheads import chain
from specheads.compat import modelopt as mtsp
from tests.support.modelopt_scripts import EAGLE, IDS, MEDUSA, PROMPT, small
from tests.support.scripted_model import Scripted
from tests.support.two_vocabularies import TARGET


def test_acceptance_is_tokens_an_iteration_of_the_first_too():
    """Iterations give 1 of 10 tokens, 2 + 1, 0 + 1, 3 + 1, and the last one."""
    text = torch.arange(3, 16).unsqueeze(0)
    model = Scripted(text, [2, 0, 3, 3])
    validation = mtsp.HFARValidation(model, TARGET)
    written, rate = validation.validate(10, input_ids=text[:, :3], ground_truth=text, steps=3)
    assert torch.equal(written, text) and rate == 10 / 5
    assert model.asked == [3, 6, 7, 11]


def test_the_bases_own_token_follows_a_rejected_draft_where_the_given_text_has_another():
    """As in ModelOpt's own loop, which appends it and compares the next draft with the text at its index."""
    own = torch.arange(3, 16).unsqueeze(0)
    given = own.clone()
    given[0, 5:7] = 50
    seen = []

    class Noted(Scripted):
        def pseudo_speculative_generate(self, input_ids, steps=1):
            seen.append(input_ids[0].tolist())
            return super().pseudo_speculative_generate(input_ids, steps)

    validation = mtsp.HFARValidation(Noted(own, [3, 3, 3, 3]), TARGET)
    text, rate = validation.validate(10, input_ids=own[:, :3], ground_truth=given, steps=3)
    # Iterations give 1 token, 1 + 1 (index 5 has the base's), 0 + 1 (index 6 too), 3 + 1, and the last 2.
    assert torch.equal(text, given) and rate == 10 / 5
    assert seen == [own[0, :length].tolist() for length in (3, 5, 6, 10)]


def test_online_the_token_in_place_of_a_rejected_one_is_appended_and_not_counted():
    text = torch.arange(3, 16).unsqueeze(0)
    model = Scripted(text, [2, 0, 3, 3])
    ids, rate = mtsp.AcceptanceRateValidation(model, TARGET).validate_online(9, input_ids=text[:, :3], steps=3)
    # iterations give 1 + 2 (+ 1), 1 + 0 (+ 1) and 1 + 2, for whose third draft there is no room
    assert torch.equal(ids, text[:, :12]) and rate == (3 + 1 + 3) / 3


@pytest.mark.parametrize("mode", [MEDUSA, EAGLE], ids=["medusa", "eagle"])
def test_acceptance_is_what_decoding_gives(mode):
    held = small(eos_token_id=None, initializer_range=0.1)  # which repeats itself now and then
    mtsp.convert(held, mode)
    if mode is MEDUSA:  # a head that is right now and then: the base's own output matrix
        for layer in held.head.lm_heads:
            layer.weight.data.copy_(held.base.lm_head.weight)
    rates = []
    for start in range(4):
        prompt = IDS[:, start : start + 5][:1]
        text, rate = mtsp.HFARValidation(held, TARGET).validate(12, input_ids=prompt, steps=2)
        out = held.generate(prompt, max_new_tokens=12, do_sample=False, tree=chain(2), return_dict_in_generate=True)
        assert torch.equal(text, out.sequences) and rate == 12 / len(out.steps)
        rates.append(rate)
    assert mode is EAGLE or max(rates) > 1


def test_acceptance_refuses_what_it_does_not_count():
    with pytest.raises(
        TypeError, match=r"^a LlamaForCausalLM is not validated here: give what convert\(\) gave, or a head"
    ):
        mtsp.HFARValidation(small(), TARGET)
    validation = mtsp.HFARValidation(Scripted(IDS, []), TARGET)
    for options, message in (
        ({"tree_paths": [[0]], "input_ids": PROMPT}, "chains alone"), ({}, "give a prompt"),
        ({"input_ids": IDS}, "a batch of 2"), ({"input_ids": PROMPT, "ground_truth": PROMPT}, "has none after"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            validation.validate(5, **options)
