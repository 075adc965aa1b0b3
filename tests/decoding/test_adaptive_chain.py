"""AdaptiveChain: where it ends, and that ending there does not change the distribution of the text."""

import itertools

import pytest
import torch

import specheads
from specheads import AdaptiveChain, DraftModel, DraftTree, Sampler
from specheads.decoding.planner import ChildLogits
from tests.reference.enumeration import Table, distance, output_probs, true_probs
from tests.support.tiny_models import near, tiny_llama

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def fixed_probs(*rows):
    """An expand() of fixed distributions: per row the probability of token 3 by depth, the rest spread evenly."""
    depth = iter(range(99))

    def expand(tokens, parents):
        level = next(depth)
        p = torch.tensor([row[level] for row in rows])
        others = ((1 - p) / 7).unsqueeze(1).expand(-1, 8).clone()
        others[:, 3] = p
        return ChildLogits(others.log().unsqueeze(1))

    return expand


def grown(plan, *rows):
    """By row the tokens of its own chain."""
    tree = plan.grow(torch.full((len(rows),), 5), fixed_probs(*rows), Sampler(), 8)
    lengths = tree.topology.num_drafted.flatten().tolist()
    used = [[*range(-1, n), *[-1] * (tree.max_depth - n)] for n in lengths]
    assert tree.parents.tolist() == used and max(lengths) == tree.max_depth
    return [row[1 : n + 1] for row, n in zip(tree.tokens.tolist(), lengths, strict=True)]


def test_the_first_unsure_token_is_the_last_of_the_chain():
    for sampled in [False, True]:
        plan = AdaptiveChain(max_depth=5, confidence=0.5, sampled=sampled)
        assert grown(plan, [0.9, 0.6, 0.4, 0.9, 0.9]) == [[3, 3, 3]]
        assert grown(plan, [0.3, 0.9]) == [[3]]
        assert grown(plan, [0.9] * 9) == [[3] * 5]
        just = 0.5 + 1e-6  # a CPU may turn 0.5 itself into 0.49999997 by way of its logarithm
        assert grown(plan, [just, just, 0.5 - 1e-6, 1.0]) == [[3, 3, 3]]


def test_a_batch_drafts_until_every_row_was_unsure():
    """And each row's chain ends where it ends alone."""
    for sampled in [False, True]:
        plan = AdaptiveChain(max_depth=6, confidence=0.5, sampled=sampled)
        rows = [1.0, 1.0, 0.4, 1.0], [0.4, 1.0, 1.0, 1.0]
        chains = grown(plan, *rows)
        assert list(map(len, chains)) == [3, 1]
        assert sampled or chains == [grown(plan, row)[0] for row in rows] == [[3] * 3, [3]]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_drafts_no_further_for_a_row_that_has_finished(sampled):
    base = tiny_llama(num_hidden_layers=2, eos_token_id=None)
    depths = []

    class Watched(DraftModel):
        def propose(self, context, sampler, plan):
            tree = super().propose(context, sampler, plan)
            lengths = tree.topology.num_drafted.flatten().tolist()
            running = [n for n, room in zip(lengths, context.remaining, strict=True) if room]
            depths.append((len(running), tree.max_depth, max(running)))
            return tree

    options = {"do_sample": sampled, "seed": 4 if sampled else None, "max_new_tokens": [4, 9, 60], "temperature": 1.0}
    texts = [
        [one.tokens for one in specheads.generate_many(base, PROMPTS, draft=draft, tree=tree, **options)]
        for draft, tree in (
            (Watched(near(base)), AdaptiveChain(6, 0.2, sampled)),
            (None, None),
        )
    ]  # fmt: skip
    assert sampled or texts[0] == texts[1]
    assert {rows for rows, *_ in depths} == {1, 2, 3} and len({deepest for _, deepest, _ in depths}) > 2
    assert all(deepest == needed for _, deepest, needed in depths)


def test_confidence_0_never_stops_early_and_1_drafts_one_token():
    assert grown(AdaptiveChain(max_depth=4, confidence=0.0), [0.2] * 9) == [[3] * 4]
    assert grown(AdaptiveChain(max_depth=4, confidence=1.0), [0.99] * 9) == [[3]]


def test_bad_options_are_refused():
    for options, message in [
        ({"max_depth": 0}, "max_depth=0 "),
        ({"confidence": 1.2}, r"confidence=1.2 must be a prob"),
    ]:
        with pytest.raises(ValueError, match=message):
            AdaptiveChain(**options)


GREEDY, SAMPLED = (AdaptiveChain(max_depth=2, confidence=0.5, sampled=sampled) for sampled in (False, True))


def test_ending_a_chain_early_does_not_change_the_distribution():
    for (plan, vocab_size, length, steps), holes in itertools.product(
        [
            (GREEDY, 3, 4, None),
            (SAMPLED, 2, 3, None),
            (SAMPLED, 3, 4, 1),
            (AdaptiveChain(max_depth=3, confidence=0.6, sampled=True), 2, 4, 1),
        ],
        [False, True],
    ):
        target, draft = Table(vocab_size, 1, holes=holes), Table(vocab_size, 2, holes=holes)
        probs = output_probs(target, draft, plan, [(0, 1)], length, steps=steps)
        assert distance(probs, true_probs(target, [(0, 1)], length)) < 1e-12


def test_one_rows_confidence_does_not_change_the_distribution_of_another():
    """The rows share the length of their drafts, and are still independent of one another."""
    for plan in [GREEDY, SAMPLED]:
        target, draft = Table(2, 5), Table(2, 6)
        prompts = [(1,), (0, 1, 1)]
        for prompt in prompts:  # the prefill's token is certain, so that one step is all there is to enumerate
            target.known[prompt] = torch.tensor([-torch.inf, 0.0], dtype=torch.float64)
        probs = output_probs(target, draft, plan, prompts, 2)
        assert distance(probs, true_probs(target, prompts, 2)) < 1e-12


def without_unsure_token(tree):
    """The anticipating mutant: whether a token is drafted depends on which token it would be."""
    last = tree.max_depth
    if last and float(tree.probs[0, last].gather(0, tree.tokens[0, last])) < SAMPLED.confidence:
        last -= 1
    return DraftTree(tree.tokens[:, : last + 1], tree.parents[:, : last + 1], last, tree.probs[:, : last + 1])


def test_the_enumeration_notices_a_chain_that_anticipates():
    target, draft = Table(3, 1), Table(3, 2)
    probs = output_probs(target, draft, SAMPLED, [(0, 1)], 4, steps=1, change=without_unsure_token)
    assert distance(probs, true_probs(target, [(0, 1)], 4)) > 1e-3
