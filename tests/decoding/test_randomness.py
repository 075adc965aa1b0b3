"""Random numbers by seed, output position and use: uniform, independent, and each row's own whatever its batch."""

import pytest
import torch

import specheads
from specheads import AdaptiveChain, Block, DraftModel, Exact, Fuzzy, Lenient, PromptLookup, SampledTree, Traversal
from specheads.decoding.probs.randomness import ACCEPT, DRAFT, RowNumbers, row_seeds
from specheads.decoding.tree import DraftTree
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, repetitive_model

CPU = torch.device("cpu")
MODEL = specheads.convert(repetitive_model("Llama"), "medusa", num_heads=3)
SMALL = DraftModel(near(MODEL.base, 0.05))
# Rules whose text depends on what was drafted: sampled drafts, and rules that draw for acceptance.
DRAFTS = {
    "plain": {},
    "lookup": {"draft": PromptLookup(4)},
    "tree, exact": {"draft": SMALL, "tree": SampledTree((2, 2, 1)), "accept": Exact()},
    "tree, traversal": {"draft": SMALL, "tree": SampledTree((2, 2, 1)), "accept": Traversal()},
    "chain, block": {"draft": SMALL, "tree": SampledTree((1, 1, 1, 1)), "accept": Block()},
    "adaptive chain": {"draft": SMALL, "tree": AdaptiveChain(6, 0.3, sampled=True)},
    "lenient": {"draft": SMALL, "tree": SampledTree((2, 1)), "accept": Lenient(0.5)},
    "fuzzy": {"draft": SMALL, "tree": SampledTree((1, 1, 1)), "accept": Fuzzy(0.1)},
    "medusa, random": {"draft": MODEL.head, "tree": specheads.chain(3), "accept": Fuzzy(0.5, "random")},
}


# --- The numbers ---


def every_number(seed, num_rows=40):
    """Numbers of many rows, positions, uses, calls and indices, by what they differ in."""
    numbers = RowNumbers.from_seeds(row_seeds(seed, num_rows), CPU)
    found = {"tokens": numbers.tokens(50)}
    for use, name in ((DRAFT, "draft"), (ACCEPT, "accept")):
        rows = []
        for position in range(5):
            numbers.begin(use, torch.full((num_rows,), position))
            rows += [numbers.next((num_rows, 4)) for _ in range(3)]
        found[name] = torch.cat(rows, 1)
    return found


def test_numbers_are_uniform_and_independent():
    found = every_number(0)
    every = torch.cat([numbers.flatten() for numbers in found.values()])
    assert every.unique().numel() == every.numel(), "two uses share a number"
    found["neighbouring seeds"] = torch.cat([every_number(seed, 2)["tokens"] for seed in range(20)])
    for name, numbers in found.items():
        numbers = numbers.flatten()
        assert numbers.min() >= 0 and numbers.max() < 1, name
        counts = torch.histc(numbers, 50, 0, 1)
        expected = numbers.numel() / 50
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 110, name  # chi-squared of 49 degrees of freedom: above 110 once in 1,000,000 runs
        for lag in (1, 3, 4, 12, 50, 60):
            apart = numbers - 0.5
            correlation = float((apart[lag:] * apart[:-lag]).mean() * 12)
            assert abs(correlation) < 5 / (numbers.numel() - lag) ** 0.5, (name, lag)


def test_a_rows_numbers_depend_on_its_own_seed_and_position_alone():
    both, alone = (RowNumbers.from_seeds(seeds, CPU) for seeds in ((5, -7), (-7,)))
    assert torch.equal(both.tokens(9)[1:], alone.tokens(9))
    assert torch.equal(alone.tokens(9)[:, :4], alone.tokens(4))
    for numbers, position in ((both, torch.tensor([3, 8])), (alone, torch.tensor([8]))):
        numbers.begin(DRAFT, position)
    assert torch.equal(both.next((2, 3))[1:], alone.next((1, 3)))
    assert torch.equal(both.next((6,))[3:], alone.next((3,))), "rows of a batch have their draws in order"
    wider, narrower = both.next((2, 5)), alone.next((1, 2))
    assert torch.equal(wider[1:, :2], narrower), "more numbers leave the earlier ones as they are"
    assert both.next((3,)).shape == (3,), "draws that rows do not share evenly"
    alone.begin(ACCEPT, torch.tensor([8]))
    accept = alone.next((1, 3))
    alone.begin(DRAFT, torch.tensor([9]))
    assert not torch.isin(accept, alone.next((1, 3))).any()


def test_the_first_row_has_the_seed_itself_and_no_two_rows_share_one():
    assert row_seeds(7, 1) == [7] and row_seeds(7, 0) == [] and row_seeds(7, 3) == row_seeds(7, 5)[:3]
    every = [seed for start in range(-20, 20) for seed in row_seeds(start, 20)]
    assert len(set(every)) == len(every)
    assert row_seeds(2**64 + 3, 2)[1] == row_seeds(3, 2)[1], "seeds of any size"


def test_a_tree_is_cut_row_by_row():
    tree = DraftTree(torch.arange(10).view(2, 5), torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 0, 2, 3]]), 3)
    assert tree.cut([3, 9]) is tree
    cut = tree.cut([1, 3])
    assert cut.parents.tolist() == [[-1, 0, 0, -1, -1], [-1, 0, 0, 2, 3]] and cut.max_depth == 3
    assert tree.cut([0, 2]).parents.tolist() == [[-1] * 5, [-1, 0, 0, 2, -1]]


# --- generate() ---


def new_tokens(inputs, row, **options):
    """The new tokens of one row, its end included and no padding."""
    columns = inputs["input_ids"].shape[1]
    out = specheads.generate(
        MODEL.base, **inputs, do_sample=True, pad_token_id=0, return_dict_in_generate=True, **options
    )
    tokens = [token for step in out.steps for token in step.tokens[row]]
    assert out.sequences[row, columns : columns + len(tokens)].tolist() == tokens
    return tokens, sum(step.accepted[row] for step in out.steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAFTS)
def test_a_rows_text_in_a_batch_is_its_text_alone(name):
    """With ends and limits that cut rows at different steps, and trees that only longer rows have room for."""
    accepted = 0
    for seeds, limit in (([3, 1, 2], 13), ([11, 11, 11], 30)):
        options = {**DRAFTS[name], "max_new_tokens": limit, "eos_token_id": [2, 9, 30, 51]}
        alone = [new_tokens(padded([row]), 0, seed=seed, **options) for row, seed in zip(PROMPTS, seeds, strict=True)]
        for row, (tokens, _) in enumerate(alone):
            assert new_tokens(padded(PROMPTS), row, seed=seeds, **options)[0] == tokens, (seeds, row)
        accepted += sum(n for _, n in alone)
    assert accepted > 0 or name == "plain", "nothing was drafted"


def test_one_seed_gives_the_rows_their_own():
    options = {**padded([PROMPTS[0]] * 3), "max_new_tokens": 20, "do_sample": True, "eos_token_id": None}
    texts = specheads.generate(MODEL.base, **options, seed=4)
    assert torch.equal(texts, specheads.generate(MODEL.base, **options, seed=row_seeds(4, 3)))
    assert len({tuple(row) for row in texts.tolist()}) == 3
    returned = {**padded(PROMPTS[:1]), "num_return_sequences": 3, "max_new_tokens": 20, "do_sample": True}
    assert torch.equal(specheads.generate(MODEL.base, **returned, eos_token_id=None, seed=4), texts)


def test_torchs_seed_governs_a_call_without_one():
    options = {**padded(PROMPTS), "max_new_tokens": 20, "do_sample": True}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts += [specheads.generate(MODEL.base, **options).tolist() for _ in range(2)]
    assert texts[:2] == texts[2:4] and len({str(text) for text in texts}) == 4
    before = torch.random.get_rng_state()
    specheads.generate(MODEL.base, **padded(PROMPTS), max_new_tokens=4, do_sample=False)
    specheads.generate(MODEL.base, **options, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before), "greedy and seeded calls leave torch's generator alone"


def test_other_seeds_are_refused():
    for seed, error, message in [
        ([1, 2], ValueError, r"seed= has 2 numbers for 3 rows; give one for each row, or a single one"),
        ("7", TypeError, r"seed='7' must be a whole number, or a list of one for each row"),
        ([1, 2, 0.5], TypeError, r"seed=\[1, 2, 0.5\] must be a whole number, or a list of one for each row"),
    ]:
        with pytest.raises(error, match=message):
            specheads.generate(MODEL.base, **padded(PROMPTS), max_new_tokens=2, do_sample=True, seed=seed)


def test_beam_search_takes_a_single_seed():
    with pytest.raises(ValueError, match="beam search draws all rows from one seed; give a single number"):
        specheads.generate(MODEL.base, **padded(PROMPTS), max_new_tokens=2, num_beams=2, seed=[1, 2, 3])
