"""A smaller model drafts: greedy text is the target's token for token, sampled text has its distribution."""

import itertools

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    BloomConfig,
    BloomForCausalLM,
)

import specheads
from specheads import (
    AdaptiveChain,
    Cascade,
    DraftModel,
    DraftTree,
    DynamicTree,
    Exact,
    MaxGram,
    SampledTree,
    StaticTree,
    Target,
    UnsupportedModel,
    chain,
    convert,
    decode,
)
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of, stop_after
from tests.support.families import RECURRENT, build
from tests.support.prompts import padded
from tests.support.tiny_models import PAD, VOCAB, gpt2, llama, near, qwen3, tiny_llama
from tests.support.two_vocabularies import OWN, TARGET

PLANS = {
    "default": None,
    "chain of 1": chain(1),
    "chain of 4": chain(4),
    "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))),
    "dynamic": DynamicTree(budget=10, depth=4, top_k=3),
    "sampled": SampledTree((3, 2, 1)),
    "sampled chain": SampledTree((1, 1, 1, 1)),
    "adaptive": AdaptiveChain(max_depth=6, confidence=0.3),
    "adaptive, sampled": AdaptiveChain(max_depth=5, confidence=0.2, sampled=True),
}


@pytest.fixture(scope="module", params=[llama, qwen3, gpt2], ids=lambda make: make.__name__)
def pair(request):
    """A target, a draft model that is often right, and the target's greedy text: a row of 1 token, and three."""
    base = request.param()
    prompts = {"one token": padded([[7]]), "ragged": padded([[31], [5, 6, 7, 8, 9], list(range(40, 57))])}
    texts = {name: base.generate(**ids, do_sample=False, max_new_tokens=24) for name, ids in prompts.items()}
    return base, near(base), prompts, texts


# --- Greedy, token for token ---


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(4)
def test_every_plan_and_batch_matches_greedy(pair, plan):
    base, small, prompts, texts = pair
    gained = steps = 0
    for name, inputs in prompts.items():
        out = specheads.generate(
            base, **inputs, draft=DraftModel(small), tree=PLANS[plan], do_sample=False, max_new_tokens=24,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, texts[name])
        assert out.lossless
        gained += sum(len(row) for step in out.steps[1:] for row in step.tokens)
        steps += sum(bool(row) for step in out.steps[1:] for row in step.tokens)
    assert gained / steps > 1.3, "hardly a draft was accepted, so this shows little"


@pytest.mark.parametrize("plan", ["chain of 4", "dynamic"])
@pytest.mark.sampled(3)
def test_a_small_model_of_other_sizes_matches_greedy(pair, plan):
    base, _, prompts, texts = pair
    small = tiny_llama(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    for name, inputs in prompts.items():
        out = specheads.generate(
            base, **inputs, draft=DraftModel(small), tree=PLANS[plan], do_sample=False, max_new_tokens=24
        )
        assert torch.equal(out, texts[name])


def test_a_prompt_of_1500_tokens_matches_greedy():
    base = llama()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1500, 3)]
    inputs, options = padded(rows), {"do_sample": False, "max_new_tokens": 12}
    expected = base.generate(**inputs, **options)
    for plan in (chain(4), PLANS["static"], SampledTree((2, 1))):
        out = specheads.generate(base, **inputs, **options, draft=DraftModel(near(base)), tree=plan)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("plan", ["chain of 4", "adaptive", "sampled"])
@pytest.mark.sampled(5)
def test_an_ending_inside_a_draft_matches_greedy(pair, plan):
    """Tokens of the continuation in turn as EOS, and every length limit, cut drafts at all their depths."""
    base, small, prompts, texts = pair
    inputs, columns = prompts["ragged"], prompts["ragged"]["input_ids"].shape[1]
    drafter, cut = DraftModel(small), False
    for token in sorted(set(texts["ragged"][:2, columns + 1 : columns + 6].flatten().tolist())):
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [token, 96], "pad_token_id": PAD}
        out = specheads.generate(
            base, **inputs, **options, draft=drafter, tree=PLANS[plan], return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, base.generate(**inputs, **options))
        cut |= any(len(row) == n > 0 for step in out.steps for row, n in zip(step.tokens, step.accepted, strict=True))
    assert cut, "no EOS cut a draft"
    for limit in range(1, 6):
        options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": 96, "pad_token_id": PAD}
        out = specheads.generate(base, **inputs, **options, draft=drafter, tree=PLANS[plan])
        assert torch.equal(out, base.generate(**inputs, **options))


def test_a_head_model_can_draft_with_a_small_model_too(pair):
    base, small, prompts, texts = pair
    model = convert(base, "medusa")
    for draft in (DraftModel(small), model.head):
        out = model.generate(**prompts["ragged"], draft=draft, do_sample=False, max_new_tokens=24)
        assert torch.equal(out, texts["ragged"])
    out = specheads.generate(base, **prompts["ragged"], draft=model.head, do_sample=False, max_new_tokens=24)
    assert torch.equal(out, texts["ragged"])


def test_an_offloaded_target_matches_greedy():
    """Its layers' weights are on no device until a layer runs, as under device_map."""
    base = llama()
    options = {"do_sample": False, "max_new_tokens": 12}
    inputs = padded([[5, 6, 7], [8]])
    expected = base.generate(**inputs, **options)
    drafter = DraftModel(near(base))
    cpu_offload(base, execution_device="cpu")
    assert base.get_input_embeddings().weight.is_meta
    assert torch.equal(specheads.generate(base, **inputs, **options, draft=drafter, tree=chain(3)), expected)


# --- The distribution of sampled text, enumerated in float64 ---


class OtherTemperature(SampledTree):
    """A mutation: nodes carry another distribution than they were drawn from."""

    def grow(self, *args):
        tree = super().grow(*args)
        probs = tree.probs.sqrt()
        return DraftTree(tree.tokens, tree.parents, tree.max_depth, probs / probs.sum(-1, keepdim=True))


def sampled_distance(vocab_size, plan, length, steps):
    """How far the distribution of text drafted by a small model is from the target's own."""
    base, small = small_base(vocab_size), near(small_base(vocab_size), 0.3)
    prompt = (1, 0, 1)

    def run(sampler):
        made = decode(
            Target(base, scratch=plan.num_nodes), DraftModel(small), torch.tensor([prompt]), torch.tensor([3]),
            plan=plan, sampler=sampler, accept=Exact(), stop=stop_after([prompt], length), max_new_tokens=length,
        )  # fmt: skip
        return sum((tuple(step.tokens[0]) for step in itertools.islice(made, None if steps is None else steps + 1)), ())

    base_probs = BaseProbs(base)
    return distance(base_probs.extend_outcomes(probs_of(run), prompt, length), base_probs.joint(prompt, length))


@pytest.mark.parametrize(
    ("vocab_size", "plan", "length", "steps"),
    [
        (4, chain(2), 3, None),
        (3, DynamicTree(budget=4, depth=2, top_k=2), 3, None),
        (3, AdaptiveChain(max_depth=2, confidence=0.4), 3, None),
        (4, SampledTree((1,)), 2, 1),
        (3, SampledTree((2,)), 3, 1),
        (2, SampledTree((1, 1)), 3, None),
        (2, SampledTree((2, 1)), 3, 1),
        (2, AdaptiveChain(max_depth=2, confidence=0.5, sampled=True), 3, None),
    ],
    ids=repr,
)
@pytest.mark.sampled(3)
def test_sampled_text_has_the_targets_distribution(vocab_size, plan, length, steps):
    assert sampled_distance(vocab_size, plan, length, steps) < 1e-12


def test_the_enumeration_notices_a_q_of_another_temperature():
    assert sampled_distance(2, OtherTemperature((1, 1)), 3, 1) > 1e-3


# --- Vocabularies and limits ---


@pytest.mark.parametrize(("target_size", "own_size"), [(202, 200), (200, 202)])
@pytest.mark.parametrize("plan", ["chain of 4", "dynamic", "sampled"])
@pytest.mark.sampled(4)
def test_padding_rows_of_a_vocabulary_are_never_drafted(target_size, own_size, plan):
    """A token that the small model has no embedding for is read as another one."""
    base, small = llama(vocab_size=target_size), llama(vocab_size=own_size)
    with torch.no_grad():
        for model in (base, small):  # padding is the likeliest token of both
            model.lm_head.weight[200:] = 0.5
            model.model.norm.weight.fill_(1.0)
    drafted = []

    class Recording(DraftModel):
        def propose(self, *args):
            tree = super().propose(*args)
            drafted.append(tree.tokens[:, 1:])
            return tree

    inputs = padded([[199, target_size - 1, 5], [3, 4, 5, 6]])
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 0, "top_k": 0}):
        out = specheads.generate(base, **inputs, **options, draft=Recording(small), tree=PLANS[plan], max_new_tokens=15)
        if not options["do_sample"]:
            assert torch.equal(out, base.generate(**inputs, **options, max_new_tokens=15))
    assert max(int(tokens.max()) for tokens in drafted) < 200


def test_other_vocabularies_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"vocabulary of 50, the target one of 97: .*tokenizer=.*target's family"):
        specheads.generate(llama(), torch.tensor([[5]]), draft=DraftModel(llama(vocab_size=50)), max_new_tokens=4)


def test_drafts_stay_inside_a_learned_position_table():
    base = gpt2(positions=32)
    drafter = DraftModel(near(base))
    rows = [list(range(20, 40)), [5, 6, 7], [8]]
    for inputs in (padded(rows[:1]), padded(rows)):
        expected = base.generate(**inputs, do_sample=False, max_new_tokens=12)
        for plan in (None, chain(4), PLANS["dynamic"], PLANS["sampled"]):
            out = specheads.generate(base, **inputs, draft=drafter, tree=plan, do_sample=False, max_new_tokens=12)
            assert torch.equal(out, expected)


def test_a_text_that_outgrows_the_small_model_continues_without_it(pair):
    base, _, prompts, texts = pair
    small = tiny_llama(num_hidden_layers=1, max_position_embeddings=25)
    drafter = DraftModel(small)
    for name, inputs in prompts.items():
        options = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
        out = specheads.generate(base, **inputs, **options, draft=drafter, tree=chain(3))
        assert torch.equal(out.sequences, texts[name])
    drafted = [max(step.drafted) for step in out.steps[1:]]
    assert drafted == sorted(drafted, reverse=True) and drafted[0] == 3 and drafted[-1] == 0
    with pytest.raises(ValueError, match=r"positions for 25 tokens, and the prompt takes 26"):
        specheads.generate(base, torch.full((1, 25), 5), draft=drafter, max_new_tokens=4)


def test_what_cannot_draft_is_refused():
    base = llama()
    with pytest.raises(TypeError, match=r"draft=LlamaForCausalLM cannot propose trees; .*DraftModel"):
        specheads.generate(base, torch.tensor([[5]]), draft=base, max_new_tokens=4)
    with pytest.raises(ValueError, match="target_tokenizer= is missing"):
        DraftModel(base, tokenizer=object())
    with pytest.raises(UnsupportedModel, match="takes no position_ids"):
        DraftModel(BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)))
    hybrid = build(*RECURRENT["LFM2"])
    with pytest.raises(UnsupportedModel, match=r"drafting through text takes back .* layers of Lfm2ForCausalLM cannot"):
        DraftModel(hybrid, tokenizer=OWN, target_tokenizer=TARGET)
    with pytest.raises(UnsupportedModel, match=r"a cascade takes back .* layers of Lfm2ForCausalLM cannot"):
        Cascade([DraftModel(hybrid), MaxGram()], [[1, 1], [0, 1]])
