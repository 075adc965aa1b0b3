"""N-gram drafters: the text is the target's, greedy and sampled, and each drafts what its definition says."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specheads import Exact, MaxGram, NGram, NGramStorage, OneLevelNGramStorage, PromptLookup, Target, chain, decode
from specheads.decoding.acceptance import Verdict
from specheads.decoding.drafters.path_drafter import build_tree
from specheads.decoding.generation.generate import generate
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.step import commit
from specheads.decoding.verify.verifier import TargetOutput
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of, stop_after
from tests.support.drafter_context import context
from tests.support.prompts import padded
from tests.support.random_rows import random_row
from tests.support.tiny_models import repetitive_model

V, PAD = 97, 0


def storage(n=3, vocab_size=V):
    return NGramStorage(n, vocab_size)


DRAFTERS = {
    "lookup": lambda vocab_size: PromptLookup(4),
    "lookup, tree": lambda vocab_size: PromptLookup(3, width=3, max_ngram=3),
    "maxgram": lambda vocab_size: MaxGram(5),
    "maxgram, bigrams": lambda vocab_size: MaxGram(5, bigrams=[(t + 1) % vocab_size for t in range(vocab_size)]),
    "storage": lambda vocab_size: NGram(4, storage=storage(3, vocab_size), filler_top_k=1),
    "storage, fillers, tree": lambda vocab_size: NGram(3, 2, storage=storage(2, vocab_size), filler_top_k=2),
    "one level, random ids": lambda vocab_size: NGram(
        3, storage=OneLevelNGramStorage(2, vocab_size), stop_if_unknown=False
    ),
}


def test_an_ngram_drafter_has_a_storage_of_its_own_which_draws_no_random_ids():
    one, other = NGram(), NGram()
    assert one.storage is not other.storage and one.storage.next_token([1, 2]) == (-1, False)
    with pytest.raises(ValueError, match=r"give storage=NGramStorage\(3, vocab_size\)"):
        NGram(stop_if_unknown=False)


# --- The distribution of the text ---


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.sampled(3)
def test_sampled_text_has_the_targets_distribution(drafter):
    """Every outcome enumerated in float64: ids of the prompt, which are matched, and new ones, which are not."""
    base, prompt, length = small_base(4), (3, 1, 3), 3
    own, drafted = DRAFTERS[drafter](4), set()
    plan = own.default_plan(torch.device("cpu"), True)

    def run(sampler):
        target = Target(base, own.layers, scratch=plan.num_nodes)
        tokens = ()
        for step in decode(
            target, own, torch.tensor([prompt]), torch.tensor([len(prompt)]), plan=plan, sampler=sampler,
            accept=Exact(), stop=stop_after([prompt], length), max_new_tokens=length + plan.depth,
        ):  # fmt: skip
            tokens += tuple(step.tokens[0])
            drafted.update(step.drafted)
        return tokens

    assert distance(probs_of(run), BaseProbs(base).joint(prompt, length)) < 1e-12
    assert max(drafted) > 1


ROWS = [[7], random_row(random.Random(0), 60, 2000), [11, 12, 13, 11, 12, 13, 11]]


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "GPT-2"])
def greedy(request):
    """A tiny model, and prompts with its greedy text: of 1 and of 2000 tokens, and both in a ragged batch of 3."""
    base = repetitive_model(request.param)
    batches = [padded([ROWS[0]]), padded([ROWS[1]]), padded(ROWS)]
    return base, [(inputs, base.generate(**inputs, do_sample=False, max_new_tokens=40)) for inputs in batches]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.sampled(5)
def test_every_drafter_matches_greedy(greedy, drafter):
    base, batches = greedy
    accepted = 0
    for inputs, expected in batches:
        out = generate(
            base,
            draft=DRAFTERS[drafter](V),
            **inputs,
            do_sample=False,
            max_new_tokens=40,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected)
        accepted += out.statistics()["accepted"]
    assert accepted > 20, "hardly a draft was accepted, so this shows little"


def until(columns):
    """A stopping criterion that no plan knows of."""
    return lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] >= columns)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.sampled(5)
def test_an_ending_inside_a_draft_matches_greedy(drafter):
    """Tokens that were accepted in turn as EOS, and several length limits, cut drafts at all their depths."""
    base, own = repetitive_model("Llama"), DRAFTERS[drafter](V)
    inputs = padded([ROWS[2], ROWS[1][:30], ROWS[0]])
    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": PAD, "return_dict_in_generate": True}
    cut, ends = False, []
    for end in ([96], None, None, None):
        if end is None:
            end = [ends.pop(0), 96]
        out = generate(base, draft=own, **inputs, **options, eos_token_id=end)
        assert torch.equal(out.sequences, base.generate(**inputs, **options, eos_token_id=end).sequences)
        for step in out.steps:
            for tokens, accepted in zip(step.tokens, step.accepted, strict=True):
                ends += [token for token in tokens[:accepted] if token not in ends]
    for limit in range(20, 24):
        options = {"do_sample": False, "max_new_tokens": limit}
        out = generate(base, draft=own, **inputs, **options)
        assert torch.equal(out, base.generate(**inputs, **options))
        stop = {"max_new_tokens": 60, "stopping_criteria": [until(inputs["input_ids"].shape[1] + limit)]}
        out = generate(base, draft=own, **inputs, do_sample=False, **stop, return_dict_in_generate=True)
        assert torch.equal(out.sequences, base.generate(**inputs, do_sample=False, **stop))
        # A step that ends on an accepted token, not on the bonus, was cut.
        cut |= any(len(t) == n > 0 for step in out.steps for t, n in zip(step.tokens, step.accepted, strict=True))
    assert cut, "no end cut a draft"


# --- The trees ---


def test_prompt_lookup_drafts_what_followed_last():
    rows = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [9, 3, 8, 4, 3], [6]]
    drafter = PromptLookup(4)
    assert drafter.paths(context(rows), 4) == [[[5, 1, 2, 3]], [[8, 4, 3, 8]], []]
    assert PromptLookup(4, max_ngram=3, min_ngram=2).paths(context(rows), 2) == [[[5, 1]], [], []]
    wide = PromptLookup(2, width=3).paths(context(rows), 2)
    assert wide == [[[5, 1], [4, 1]], [[8, 4]], []]


def test_paths_share_the_nodes_of_a_common_beginning_and_rows_with_fewer_leave_slots_unused():
    history, plan = [[1], [2], [3]], chain(5)
    runs = [[[4, 5, 6], [4, 7]], [[8]], []]
    tree = build_tree(torch.tensor([1, 2, 3]), history, runs, plan)
    assert tree.tokens.tolist() == [[1, 4, 5, 6, 7], [2, 8, 2, 2, 2], [3] * 5]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1], [-1, 0, -1, -1, -1], [-1] * 5]
    assert (tree.max_depth, tree.probs) == (3, None)
    # The plan bounds nodes and depth; the first path comes first.
    short = build_tree(torch.tensor([1, 2, 3]), history, runs, chain(2))
    assert short.tokens.tolist() == [[1, 4, 5], [2, 8, 2], [3] * 3]
    assert short.max_depth == 2


def test_a_tree_is_as_small_as_it_can_be_on_the_cpu_and_of_one_size_elsewhere():
    nothing = build_tree(torch.tensor([1, 2]), [[1], [2]], [[], []], chain(5))
    assert (nothing.num_nodes, nothing.max_depth) == (1, 0)
    elsewhere = build_tree(torch.tensor([1], device="meta"), [[1]], [[[3, 4]]], chain(5))
    assert (elsewhere.num_nodes, elsewhere.max_depth) == (6, 5)


def test_what_is_drafted_is_counted_row_by_row(monkeypatch):
    found, paths = [], PromptLookup.paths

    def recording(self, context, length):
        own = paths(self, context, length)
        found.append([sum(map(len, row)) for row in own])
        return own

    monkeypatch.setattr(PromptLookup, "paths", recording)
    out = generate(
        repetitive_model("Llama"), draft=PromptLookup(4, min_ngram=2), **padded([ROWS[2], ROWS[1][:30]]),
        do_sample=False, max_new_tokens=20, eos_token_id=96, return_dict_in_generate=True,
    )  # fmt: skip
    taken = [
        [count * bool(row) for count, row in zip(counts, step.tokens, strict=True)]
        for counts, step in zip(found, out.steps[1:], strict=True)
    ]
    assert [step.drafted for step in out.steps] == [[0, 0], *taken]
    assert any(all(step.tokens) and len(set(step.drafted)) == 2 for step in out.steps), "rows drafted alike"
    assert out.statistics()["drafted"] == sum(map(sum, taken))


# --- The storages ---


class Events:
    """A storage by definition: a list of (context, token) events, searched anew for each answer."""

    def __init__(self, levels):
        self.levels, self.events = levels, []

    def update(self, context, tokens):
        self.events += [(tuple(context), token) for token in tokens]

    def ranked(self, context):
        for level in self.levels:
            tail = tuple(context[-level:])
            matches = [
                (index, token)
                for index, (known, token) in enumerate(self.events)
                if len(tail) == level <= len(known) and known[-level:] == tail
            ]
            if matches:
                last = {token: index for index, token in matches}
                count = Counter(token for _, token in matches)
                return sorted(count, key=lambda token: (-count[token], -last[token]))
        return []


def test_a_storage_answers_as_its_events_do():
    for kind, levels in [(NGramStorage, (3, 2, 1)), (OneLevelNGramStorage, (3,))]:
        rng = random.Random(0)
        own, reference = kind(4, 50), Events(levels)
        prompt = random_row(rng, 4, 30)
        own.initialize(prompt)
        for index in range(1, len(prompt)):
            reference.update(prompt[:index], prompt[index : index + 1])
        unknown = 0
        for _ in range(150):
            asked = random_row(rng, 5, rng.randint(1, 6))
            ranked = reference.ranked(asked)
            token, known = own.next_token(asked)
            assert known == bool(ranked)
            assert 0 <= token < 50
            assert not known or token == ranked[0]
            assert own.followers(asked, 3) == ranked[:3]
            unknown += not known
            more = [rng.randrange(4) for _ in range(rng.randint(1, 3))]
            own.update(asked, more)
            reference.update(asked, more)
        assert unknown, "every context was known, so stopping was not tried"
        own.reset()
        assert not own.next_token(prompt)[1]


def test_unknown_contexts_give_the_same_random_ids_again_after_a_reset():
    own = storage()
    drawn = [own.next_token([1])[0] for _ in range(20)]
    own.reset()
    assert drawn == [own.next_token([1])[0] for _ in range(20)]
    assert len(set(drawn)) > 5


def learned_counts(own):
    return {
        (gram, token): count
        for grams in own._known.values()
        for gram, followers in grams.items()
        for token, count in followers.counts.items()
    }


def test_the_storage_learns_the_text_and_the_targets_other_likely_ids():
    for fillers in [1, 3]:
        base, prompt = repetitive_model("Llama"), ROWS[1][:40]
        drafter = NGram(4, storage=storage(4), filler_top_k=fillers)
        out = generate(
            base, draft=drafter, **padded([prompt]), do_sample=False, max_new_tokens=30, return_dict_in_generate=True
        )
        assert out.statistics()["accepted"]
        text = out.sequences[0].tolist()[: -len(out.steps[-1].tokens[0])]  # nothing was drafted after the last step
        reference = storage(4)
        reference.initialize(text)
        with torch.no_grad():
            top = base(torch.tensor([text])).logits[0].topk(fillers).indices.tolist()
        for index in range(len(prompt), len(text)) if fillers > 1 else ():
            reference.update(text[:index], top[index - 1])
        assert learned_counts(drafter.storage) == learned_counts(reference)


def test_the_targets_likeliest_ids_are_those_along_the_accepted_path():
    tree = build_tree(torch.tensor([1]), [[1]], [[[2], [3, 4]]], chain(3))
    verdict = Verdict(path=torch.tensor([[0, 2, 3]]), length=torch.tensor([3]), bonus=torch.tensor([5]))
    logits = torch.eye(50)[torch.tensor([10, 20, 30, 40])] * 2 + torch.eye(50)[torch.tensor([11, 21, 31, 41])]
    out, target = TargetOutput(logits.unsqueeze(0), torch.zeros(1, 4, 0)), SimpleNamespace(commit=lambda *_: None)
    extended = context([[9, 1]]).extend(commit(target, Sampler(), tree, out, verdict, 2), [[3, 4, 5]], [[0, 0]])
    assert extended.history == [[9, 1, 3, 4, 5]]
    assert extended.top.tolist() == [[[10, 11], [30, 31], [40, 41]]]


def test_the_rows_of_a_batch_learn_together_and_each_position_once():
    own = NGram(2, storage=storage(2), filler_top_k=2)
    given = context([[1, 2, 3], [4, 1]], top=torch.tensor([[[3, 7]], [[8, 1]]]), new=torch.tensor([2, 1]))
    assert own.paths(given, 2) == [[[]], [[2, 3]]]
    once = Counter({((1,), 2): 1, ((2,), 3): 2, ((2,), 7): 1, ((4,), 1): 2, ((4,), 8): 1})
    assert learned_counts(own.storage) == once
    nothing_new = replace(given, top=torch.zeros(2, 3, 2, dtype=torch.long), new=torch.tensor([0, 0]))
    own.paths(nothing_new, 2)
    assert learned_counts(own.storage) == once


def test_of_the_targets_likely_ids_counted_alike_the_likeliest_comes_first():
    drafter = NGram(1, 4, storage=storage(2), filler_top_k=3)
    given = context([[1, 2]], top=torch.tensor([[[5, 6, 7]]]), new=torch.tensor([1]))
    drafter.paths(given, 1)
    assert drafter.storage.followers([1], 4) == [2, 5, 6, 7]


def test_what_was_learned_stays_between_prompts_if_reset_between_is_false():
    for reset_between in [True, False]:
        base = repetitive_model("Llama")
        drafter = NGram(4, storage=storage(), reset_between=reset_between)
        for row in (ROWS[2], [50, 51, 52]):
            generate(base, draft=drafter, **padded([row]), do_sample=False, max_new_tokens=5)
        assert drafter.storage.next_token([50, 51]) == (52, True)
        assert (((11, 12), 13) in learned_counts(drafter.storage)) != reset_between
        drafter.reset()
        assert not learned_counts(drafter.storage)


# --- Bad options ---


def test_bad_options_are_named():
    for make, message in [
        (lambda: PromptLookup(0), "num_tokens=0 must be a whole number of at least 1"),
        (lambda: PromptLookup(2.5), "num_tokens=2.5 must be"),
        (lambda: PromptLookup(width=0), "width=0 must be"),
        (lambda: PromptLookup(min_ngram=0), "min_ngram=0 must be"),
        (lambda: PromptLookup(max_ngram=2, min_ngram=3), "max_ngram=2 "),
        (lambda: NGram(storage=storage(), filler_top_k=0), "filler_top_k=0 must be"),
        (lambda: NGramStorage(1, V), "n=1 "),
        (lambda: NGramStorage(3, 0), "vocab_size=0 must be"),
        (lambda: storage().next_token([1, 2], level=3), r"has no level 3: ask for \(2, 1\)"),
        (lambda: storage().next_token([1, 2], level=2), "level 2 has seen no context of 2 ids yet"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
