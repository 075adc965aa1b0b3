"""The notebook's functions in specheads.compat."""

from functools import partial

import numpy
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from specheads import compat
from specheads.compat import notebook
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of
from tests.reference.greedy_replay import NEW, PROMPT, greedy_draft, replayed
from tests.support.tiny_models import near, tiny_llama


def test_topk_probas_keep_k_tokens_and_sum_to_one():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 9)
    probs = compat.get_topk_probas(logits, 4)
    best = logits.topk(4, dim=-1)
    torch.testing.assert_close(probs.gather(-1, best.indices), best.values.softmax(-1))
    assert (probs > 0).sum(-1).eq(4).all()


def test_a_draft_carries_the_distributions_it_was_drawn_from(small):
    torch.manual_seed(1)
    ids, probs = compat.generate_draft(torch.tensor([PROMPT]), max_new_tokens=4, k=3, model=small)
    with torch.no_grad():
        logits = small(ids).logits[:, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(probs, compat.get_topk_probas(logits, 3), atol=1e-5, rtol=1e-4)
    assert ids.shape == (1, len(PROMPT) + 4) and probs.gather(2, ids[:, len(PROMPT) :].unsqueeze(2)).min() > 0
    greedy, ones = compat.generate_draft(torch.tensor([PROMPT]), 3, 1, small)
    assert greedy[0, len(PROMPT) :].tolist() == greedy_draft(small)(PROMPT, 3) and ones.max() == 1


def test_speculative_decode_with_k_1_is_greedy_and_counts_what_it_kept(target, small):
    target.generation_config.eos_token_id = None
    ids, kept = compat.speculative_decode(torch.tensor([PROMPT]), NEW, 5, 1, target=target, drafter=small)
    target.generation_config.eos_token_id = 2
    expected, accepted, _ = replayed(target, greedy_draft(small), 5, NEW)
    assert ids[0].tolist() == PROMPT + expected and kept == accepted


@pytest.mark.parametrize(("k", "gamma", "length"), [(2, 1, 3), (2, 2, 2), (3, 1, 2)])
def test_speculative_decode_has_the_distribution_of_the_targets_k_likeliest(monkeypatch, k, gamma, length):
    base = small_base(4)
    small = near(small_base(4), 0.3)
    prompt = (1, 0, 1)

    def run(sampler):
        def adopt(processors, **kwargs):
            sampler.processors, sampler.needs_prefix = processors, False
            return sampler

        monkeypatch.setattr("specheads.decoding.generation.generate.Sampler", adopt)
        ids, _ = compat.speculative_decode(torch.tensor([prompt]), length, gamma, k, target=base, drafter=small)
        return tuple(ids[0, len(prompt) :].tolist())

    def topk(logits):
        return logits.masked_fill(logits < logits.sort().values[..., -k], -torch.inf)

    assert distance(probs_of(run), BaseProbs(base, topk).joint(prompt, length)) < 1e-12


@pytest.fixture
def no_models(monkeypatch):
    monkeypatch.setattr(notebook, "_MODELS", {})


@pytest.fixture
def endless(target):
    """The target without an end token."""
    target.generation_config.eos_token_id = None
    yield target
    target.generation_config.eos_token_id = 2


def test_models_are_given_once_or_in_each_call(endless, small, no_models):
    ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match=r"^there is no target yet: call set_models\(target, drafter\) once, or give"):
        compat.speculative_decode(ids, max_tokens=8)
    with pytest.raises(ValueError, match=r"^there is no drafter yet: .* or give model="):
        compat.generate_draft(ids)
    given = compat.speculative_decode(ids, max_tokens=8, gamma=3, target=endless, drafter=small)
    alone, _ = compat.generate_draft(ids, max_new_tokens=8, k=1, model=endless)
    assert torch.equal(given[0], alone), "the target alone, as its runs without drafts are"
    compat.set_models(endless, small)
    kept = compat.speculative_decode(ids, max_tokens=8, gamma=3)
    assert torch.equal(kept[0], given[0]) and kept[1] == given[1]
    draft, probs = compat.generate_draft(ids)
    assert torch.equal(draft, compat.generate_draft(ids, 5, 1, small)[0]) and probs.shape == (1, 5, 97)


def test_kept_counts_the_texts_drafted_tokens_and_no_bonus(endless, small):
    """Of a draft accepted whole, as always where a model drafts for itself, gamma are kept of each gamma + 1."""
    ids = torch.tensor([PROMPT])
    for gamma, length in ((3, 1 + 4 * 4), (5, 1 + 2 * 6)):
        _, kept = compat.speculative_decode(ids, length, gamma, target=endless, drafter=endless)
        assert kept == length - 1 - (length - 1) // (gamma + 1)
    end = endless.plain[3]
    endless.generation_config.eos_token_id = end
    text, kept = compat.speculative_decode(ids, NEW, 5, target=endless, drafter=endless)
    assert text[0, len(PROMPT) :].tolist() == endless.plain[:4] and kept == 3, "what the text has, up to its end"


OFFLOADED = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["device_map", "cpu_offload", "disk_offload"])
@pytest.mark.parametrize("k", [1, 3])
def test_an_offloaded_target_writes_the_same_text(how, k, endless, small, tmp_path):
    ids = torch.tensor([PROMPT])
    plain = tiny_llama(num_hidden_layers=3, eos_token_id=None)
    plain.save_pretrained(tmp_path)
    spread = {"device_map": OFFLOADED, "offload_folder": tmp_path / "layers"} if how == "device_map" else {}
    target = AutoModelForCausalLM.from_pretrained(tmp_path, **spread)
    if how == "device_map":
        assert target.hf_device_map["model.layers.1"] == "disk"
    else:
        offload = cpu_offload if how == "cpu_offload" else partial(disk_offload, offload_dir=tmp_path / "layers")
        offload(target, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in target.model.layers[1].parameters()), "no weights stay on the device"
    texts = []
    for model in (plain, target):
        torch.manual_seed(2)
        texts.append(compat.speculative_decode(ids, NEW, 4, k, target=model, drafter=small))
    (text, kept), (same, as_many) = texts
    assert torch.equal(text, same) and kept == as_many > 0
    if k == 1:
        assert text[0, len(PROMPT) :].tolist() == endless.plain
        assert compat.beam_search_generate(PROMPT, target, NEW, num_beams=1, eos_tokens_id=[]) == endless.plain
    assert all(p.is_meta for p in target.model.layers[1].parameters())


def test_numbers_of_numpy_count_as_numbers(target, small):
    ids, three = torch.tensor([PROMPT]), numpy.int64(3)
    torch.manual_seed(0)
    text = compat.speculative_decode(ids, three, three, three, target=target, drafter=small)[0]
    torch.manual_seed(0)
    assert torch.equal(text, compat.speculative_decode(ids, 3, 3, 3, target=target, drafter=small)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": PROMPT}, "ids must be a tensor (1, T)"), ({"ids": torch.tensor([PROMPT] * 2)}, "not a tensor (2, 6)"),
        ({"max_tokens": 0}, "max_tokens=0 "), ({"gamma": 0}, "gamma=0 "),
        ({"k": 0}, "k=0 "), ({"k": 2.0}, "k=2.0 "),
        ({"target": "llama"}, "target='llama' must be a model"),
        ({"max_tokens": tiny_llama(num_hidden_layers=1)}, "models are keywords"),
    ],
    ids=range(8),
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(target, small, options, message):
    given = {"ids": torch.tensor([PROMPT]), "target": target, "drafter": small, **options}
    with pytest.raises((ValueError, TypeError)) as caught:
        compat.speculative_decode(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)
