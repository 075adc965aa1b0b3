"""Cascades: they draft what the published algorithm drafts, at its cost, and the text stays the target's."""

import random

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import specheads
from specheads import (
    Cascade,
    CSLeniency,
    DraftModel,
    Exact,
    Fuzzy,
    MaxGram,
    NGram,
    NGramStorage,
    PromptLookup,
    Target,
    Typical,
    convert,
    decode,
)
from specheads.bench.cost import published, walltime_improvement
from specheads.decoding.drafters.k_matrix import most_written, parse_k_matrix
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of, stop_after
from tests.reference.published_cascade import Published
from tests.reference.published_maxgram import published as published_maxgram
from tests.support.prompts import padded
from tests.support.tiny_models import gpt2, llama, near, qwen3, tiny_llama

T5_BY_SIZE, T5_BY_WORK = [[5, 14, 10], [0, 1, 10], [0, 0, 10]], [[5, 8, 10], [0, 1, 10], [0, 0, 10]]
LLAMA = [[13, 10], [0, 10]]
BIGRAMS = [(token + 1) % 97 for token in range(97)]


# --- The published algorithm ---


class Until(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores, **kwargs):
        return torch.tensor([ids.shape[1] >= self.length] * len(ids))


@pytest.fixture(scope="module")
def world():
    """A target, a prompt that repeats itself (so that n-grams are right too) with its text, two drafts, a cache."""
    base = tiny_llama(num_hidden_layers=1)
    prompt = [*range(20, 27), *range(20, 27), 20, 21]
    record = base.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=90, eos_token_id=96)[0].tolist()
    models = [near(base, 0.03), near(base, 0.06)]
    # Flat distributions, so that it matters whose q a token is judged by.
    for model, scale in zip(models, (0.1, 0.4), strict=True):
        model.lm_head.weight.data *= scale
    return base, prompt, record, models, {}


@pytest.mark.parametrize(
    ("k_matrix", "bottom", "leniency"),
    [
        *[(k_matrix, True, leniency) for k_matrix in (LLAMA, T5_BY_SIZE, T5_BY_WORK) for leniency in (1, 2, 3)],
        (T5_BY_SIZE, True, 60),  # so lenient that it matters whose q a token is judged by
        ([[2, 3, 2], [0, 0, 3], [0, 0, 4]], True, 3),  # only n-grams write for the largest draft
        ([[4, 2], [0, 2]], False, 3),
    ],
)
@pytest.mark.sampled(4)
def test_proposals_reviews_and_swi_are_those_of_a_direct_simulation(world, k_matrix, bottom, leniency):
    base, prompt, record, models, cached_probs = world
    models = models[: len(k_matrix) - bottom]
    proposed, counted, fed = [], [], [0] * len(models)

    class Recording(Cascade):
        def propose(self, context, sampler, plan):
            tree = super().propose(context, sampler, plan)
            proposed.append(tree.tokens[0, 1:].tolist())
            counted.append((self.reviews, tuple(fed)))
            return tree

    def count_fed(i):
        return lambda module, args, out: fed.__setitem__(i, fed[i] + args[0].numel())

    hooks = [model.get_input_embeddings().register_forward_hook(count_fed(i)) for i, model in enumerate(models)]
    drafts = [*map(DraftModel, models), *([MaxGram(bigrams=BIGRAMS)] if bottom else [])]
    until = len(prompt) + 20
    specheads.generate(
        base, torch.tensor([prompt]), draft=Recording(drafts, k_matrix, leniency), do_sample=False, max_new_tokens=90,
        eos_token_id=96, stopping_criteria=StoppingCriteriaList([Until(until)]),
    )  # fmt: skip
    for hook in hooks:
        hook.remove()

    copies = (lambda ids: published_maxgram(ids, 10, BIGRAMS)) if bottom else None
    direct = Published(models, copies, k_matrix, leniency, record, cached_probs=cached_probs)
    ids, proposals = direct.generate(len(prompt), until)
    assert len(proposals) > 2 and max(map(len, proposals)) > 5
    assert proposed == proposals
    reviews, read = counted[-1]
    assert reviews == (*direct.reviews[1:], *[0] * bottom)
    assert [n - len(prompt) for n in read] == direct.fed, "a draft read a token twice"
    costs, tokens = published("model_parameters", ["Llama-7b", "llama-160m", "llama-68m"]), len(ids) - len(prompt)
    improvement = walltime_improvement(tokens, [1 + len(proposed), *reviews[: len(models)]], costs[: 1 + len(models)])
    assert improvement == tokens * 7000 / sum(n * c for n, c in zip(direct.reviews, (7000, 160, 68), strict=False))


def test_the_papers_notation_is_cumulative():
    names = ["a", "b", "c"]
    assert parse_k_matrix(torch.tensor([[5, 19, 29], [0, 1, 11], [0, 0, 10]]), names, "paper") == parse_k_matrix(
        T5_BY_SIZE, names
    )


def test_the_plan_has_room_for_the_longest_proposal_and_no_more():
    """Compared with all possible outcomes of reviews, for random k-matrices."""

    def reachable(k_matrix, path_lengths, reviewer):
        lengths = {0}
        for column in range(reviewer, len(path_lengths)):
            wanted, share = sum(k_matrix[reviewer][: column + 1]), k_matrix[reviewer][column]
            done, open_ = set(), set(lengths)
            while open_:
                length = open_.pop()
                if length >= wanted or not share:
                    done.add(length)
                    continue
                if path_lengths[column]:
                    gains = {path_lengths[column]}
                else:
                    gains = set(range(1, max(reachable(k_matrix, path_lengths, column + 1)) + 2))
                open_ |= {length + gain for gain in gains}
            lengths = done
        return lengths

    rng = random.Random(0)
    for size, bottom in [(1, True), (2, True), (2, False), (3, True), (3, False)] * 8:
        rows = [[0] * r + [rng.randint(0, 4) for _ in range(r, size)] for r in range(size)]
        rows = [[k + (c == r) for c, k in enumerate(row)] for r, row in enumerate(rows)]
        path_lengths = [None] * (size - bottom) + [rng.randint(1, 4)] * bottom
        assert most_written(parse_k_matrix(rows, ["draft"] * size), path_lengths) == max(
            reachable(rows, path_lengths, 0)
        )


# --- Greedy, token for token ---


def cascades(base):
    small, smaller = near(base), near(base, 0.06)
    return {
        "Llama": Cascade([DraftModel(small), MaxGram()], LLAMA, leniency=3),
        "T5": Cascade([DraftModel(small), DraftModel(smaller), PromptLookup(4)], [[3, 4, 2], [0, 1, 4], [0, 0, 4]], 2),
        "no n-grams": Cascade([DraftModel(small), DraftModel(smaller)], [[4, 1], [0, 2]]),
        "storage": Cascade([DraftModel(small), NGram(3, storage=NGramStorage(3, 97))], [[4, 2], [0, 3]]),
    }


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
@pytest.mark.sampled(3)
def test_greedy_text_is_the_targets_and_rows_do_not_disturb_one_another(make):
    base = make()
    rows = [[31], [5, 6, 7, 8, 9], list(range(40, 57))]
    options = {"do_sample": False, "max_new_tokens": 20}
    inputs = padded(rows)
    expected = base.generate(**inputs, **options)
    for name, drafter in cascades(base).items():
        out = specheads.generate(base, **inputs, **options, draft=drafter, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected), name
        assert out.statistics()["accepted_length"] > 1.2
        assert max(max(step.drafted) for step in out.steps) <= drafter.most
        if name != "T5":
            continue
        for b, row in enumerate(rows):
            alone = specheads.generate(
                base, torch.tensor([row]), draft=drafter, do_sample=False, return_dict_in_generate=True,
                max_new_tokens=20 + len(rows[-1]) - len(row),
            )  # fmt: skip
            steps, left = [], 20
            for step in out.steps:
                if left - 1 > drafter.most:  # near the end rows with more room let a step draft deeper than they use
                    steps.append((step.drafted[b], step.accepted[b]))
                left -= len(step.tokens[b])
            assert len(steps) > 2
            assert steps == [(step.drafted[0], step.accepted[0]) for step in alone.steps[: len(steps)]]


def test_a_prompt_of_1100_tokens_matches_greedy():
    base = llama()
    ids = torch.randint(3, 97, (1, 1100), generator=torch.Generator().manual_seed(0))
    expected = base.generate(ids, do_sample=False, max_new_tokens=8)
    out = specheads.generate(base, ids, draft=cascades(base)["T5"], do_sample=False, max_new_tokens=8)
    assert torch.equal(out, expected)


def test_an_ending_inside_a_draft_matches_greedy():
    base = llama()
    inputs = padded([[31], [5, 6, 7, 8, 9]])
    drafter = Cascade([DraftModel(base), MaxGram()], [[5, 3], [0, 3]])  # always right, so that endings are drafted
    text, cut = base.generate(**inputs, do_sample=False, max_new_tokens=10), False
    for ending in [{"eos_token_id": int(token), "pad_token_id": 0} for token in text[0, 7:10]] + [{}]:
        for limit in (9,) if ending else (1, 2, 3, 4):
            options = {"do_sample": False, "max_new_tokens": limit, **ending}
            out = specheads.generate(base, **inputs, **options, draft=drafter, return_dict_in_generate=True)
            assert torch.equal(out.sequences, base.generate(**inputs, **options))
            cut |= any(len(r) == n > 0 for step in out.steps for r, n in zip(step.tokens, step.accepted, strict=True))
    assert cut, "no ending cut a draft"


def test_the_other_drafts_continue_where_one_runs_out_of_positions():
    base = gpt2()
    small = gpt2(positions=20)
    inputs, options = padded([[31], [5, 6, 7, 8, 9]]), {"do_sample": False, "max_new_tokens": 24}
    drafter = Cascade([DraftModel(small), MaxGram(4)], [[4, 3], [0, 4]])
    out = specheads.generate(base, **inputs, **options, draft=drafter)
    assert torch.equal(out, base.generate(**inputs, **options))


# --- The distribution of sampled text ---


@pytest.mark.parametrize(("prompts", "length"), [([(1, 0, 1), (0,)], 2), ([(1, 0, 1)], 3)])
def test_sampled_text_has_the_targets_distribution(prompts, length):
    base = small_base(2)
    drafter = Cascade([DraftModel(near(base, 0.3)), MaxGram(1)], [[1, 1], [0, 1]], leniency=2)
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([[*prompt, 0, 0][:3] for prompt in prompts])

    def run(sampler):
        steps = decode(
            Target(base, scratch=drafter.most + 1), drafter, ids, torch.tensor(lengths), accept=Exact(),
            plan=drafter.default_plan(ids.device, True), sampler=sampler, stop=stop_after(prompts, length),
            max_new_tokens=length + 2,
        )  # fmt: skip
        rows = [() for _ in prompts]
        for step in steps:
            rows = [(*row, *gained) for row, gained in zip(rows, step.tokens, strict=True)]
        return tuple(rows)

    base_probs = BaseProbs(base)
    expected = {(): 1.0}
    for prompt in prompts:
        expected = {(*a, b): p * q for a, p in expected.items() for b, q in base_probs.joint(prompt, length).items()}
    assert distance(probs_of(run), expected) < 1e-12


def test_other_rules_judge_a_cascade_and_one_that_needs_draft_probs_refuses_it_by_name():
    base = llama()
    drafter, ids = cascades(base)["Llama"], torch.tensor([[5, 6, 7, 5, 6]])
    for accept in (Typical(), CSLeniency(2)):
        out = specheads.generate(base, ids, draft=drafter, accept=accept, do_sample=False, max_new_tokens=8)
        assert out.shape[1] == 13
    with pytest.raises(ValueError, match=r"Fuzzy compares draft and target probabilities, and Cascade gives none"):
        specheads.generate(base, ids, draft=drafter, accept=Fuzzy(0.1), do_sample=False, max_new_tokens=8)


# --- Bad input ---


def test_what_makes_no_cascade_is_refused(model):
    small = DraftModel(llama())
    lookup, two = MaxGram(), [small, MaxGram()]
    for drafts, k_matrix, message in [
        ([], [], "a cascade needs drafts"),
        (small, [[1]], "a cascade needs drafts, for instance Cascade"),
        ([lookup, small], LLAMA, r"draft 0 \(MaxGram\) copies and cannot review; put it last"),
        ([small, model.head], LLAMA, r"draft 1 \(Eagle3Head\) is a head, .*; put it first"),
        ([small, PromptLookup(width=2)], LLAMA, "PromptLookup has width=2; make it width=1"),
        (two, [[13, 10]], "has rows of 2, but 2 drafts need 2 × 2"),
        (two, [[1], [0]], "has rows of 1, 1, but 2 drafts need 2 × 2"),
        (two, 7, "is a list of rows, .*, not 7"),
        (two, [[1, 1], [1, 1]], r"k_matrix\[1\]\[0\]=1 must be 0: a k-matrix is upper triangular"),
        (two, [[1, -1], [0, 1]], r"k_matrix\[0\]\[1\]=-1 must be a number of tokens"),
        (two, [[1, 1.5], [0, 1]], r"k_matrix\[0\]\[1\]=1.5 must be a number of tokens"),
        (two, [[1, 1], [0, 0]], r"row 1 of the k-matrix is zero: draft 0 \(DraftModel\) would have nothing to review"),
        (two, [[0, 0], [0, 1]], "row 0 of the k-matrix is zero: the target would have nothing to review"),
        (two, [[0, 1], [0, 1]], r"column 0 of the k-matrix is zero: draft 0 \(DraftModel\) would draft nothing"),
    ]:
        with pytest.raises(ValueError, match=message):
            Cascade(drafts, k_matrix)
    with pytest.raises(ValueError, match=r"k_matrix\[0\]\[0\]=6, but the head drafts at most 5 tokens ahead"):
        Cascade([convert(tiny_llama(num_hidden_layers=3), "medusa").head, lookup], [[6, 4], [0, 6]])
    with pytest.raises(TypeError, match=r"draft 0 \(LlamaForCausalLM\) cannot be part of .*DraftModel"):
        Cascade([small.small], [[1]])
    for leniency in (0.5, float("nan"), "2"):
        with pytest.raises(ValueError, match=r"leniency=.* must be 1"):
            Cascade(two, LLAMA, leniency)
    with pytest.raises(ValueError, match="notation='cumulative' of a k-matrix must be one of 'incremental', 'paper'"):
        Cascade(two, LLAMA, notation="cumulative")
    with pytest.raises(ValueError, match=r"row 0 of the k-matrix, \[13, 10\], decreases"):
        Cascade(two, LLAMA, notation="paper")
    other = Cascade([DraftModel(llama(vocab_size=50)), lookup], LLAMA)
    with pytest.raises(ValueError, match=r"50.*97"):
        specheads.generate(llama(), torch.tensor([[5]]), draft=other, max_new_tokens=4)
