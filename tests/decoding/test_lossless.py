"""Every lossless drafter × rule × shape × batch keeps the target's joint distribution: enumerated in float64, to 1e-12.

The rules one by one, and how much each accepts: test_accept.py, test_block.py, test_fuzzy.py. Real models and heads
below the same loop: test_exactness.py, test_draft_model.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specheads import (
    AdaptiveChain,
    Block,
    DraftModel,
    DraftTree,
    DynamicTree,
    Exact,
    Fuzzy,
    Lenient,
    MaxGram,
    NGram,
    NGramStorage,
    OneLevelNGramStorage,
    PromptLookup,
    SampledTree,
    StaticTree,
    Traversal,
    chain,
)
from specheads.decoding import step
from specheads.decoding.acceptance import walk
from specheads.decoding.acceptance.exact import follow_tokens
from tests.reference.base_probs import small_base
from tests.reference.enumeration import Table, TableDrafter, distance, output_probs, true_probs

V, LENGTH = 3, 3
ALONE = [(0, 1, 0)]
THREE = [(1,), (0, 1, 0), (2, 0, 2, 0)]  # the shortest comes first, so that a row mixed up with another would show
RULES = {
    "exact": Exact(), "block": Block(), "traversal": Traversal(), "lenient 1": Lenient(1),
    "rescue 0": Fuzzy(0, mode="rescue"),
}  # fmt: skip
POINT_MASSES = {
    "chain": chain(2), "comb": StaticTree(((0,), (1,), (0, 0), (0, 1))), "dynamic": DynamicTree(5, 2, 2),
    "adaptive": AdaptiveChain(max_depth=2, confidence=0.5),
}  # fmt: skip
SAMPLED = {
    "sampled chain": SampledTree((1, 1)), "sampled tree": SampledTree((2,)),
    "adaptive, sampled": AdaptiveChain(max_depth=2, confidence=0.6, sampled=True),
}  # fmt: skip
SHAPES = POINT_MASSES | SAMPLED


class TableModel:
    """What a small model says of its text, out of the table it carries: CachedModel's calls, for DraftModel."""

    device = torch.device("cpu")

    def __init__(self, model, rows, *, scratch, limit, source=None):
        self.table, self.rows = model.table, [tuple(row) for row in rows]
        self.reset_paths()

    def reset_paths(self):
        self.paths = [[row] for row in self.rows]
        self.logits = self.answer()

    def answer(self):
        return torch.stack([torch.stack([self.table(path) for path in row]) for row in self.paths])

    def read(self, unread, count, bound):
        counted = zip(self.rows, unread.tolist(), count.tolist(), strict=True)
        self.rows = [(*row, *more[:n]) for row, more, n in counted]
        self.reset_paths()

    def draft(self, tokens, parents):
        levels = zip(self.paths, tokens.tolist(), parents.tolist(), strict=True)
        self.paths = [[(*row[b], t) for t, b in zip(new, above, strict=True)] for row, new, above in levels]
        return self.answer()


@pytest.fixture(scope="module")
def small():
    return small_base(V)


@pytest.fixture
def drafter_of(small, monkeypatch):
    """By name, a drafter; those that ask a model ask the table instead."""
    monkeypatch.setattr("specheads.decoding.drafters.model.CachedModel", TableModel)

    def make(name, table):
        small.table = table
        return {
            "head": lambda: TableDrafter(table),
            "draft model": lambda: DraftModel(small),
            "lookup": lambda: PromptLookup(2, width=2),
            "n-grams": lambda: NGram(2, 2, storage=NGramStorage(3, V), filler_top_k=2),
            "n-grams of one level": lambda: NGram(2, storage=OneLevelNGramStorage(2, V), stop_if_unknown=False),
            "max-gram": lambda: MaxGram(2, bigrams=[1, 2, 1]),
        }[name]()

    return make


DRAFTERS = ("head", "draft model", "lookup", "n-grams", "n-grams of one level", "max-gram")
GROWING, COPYING = DRAFTERS[:2], DRAFTERS[2:]


class Narrow(Table):
    """Fewer things left to chance, so that what three rows do together can be counted whole: two tokens of the first of
    THREE, one of the second, none of the last."""

    def __call__(self, prefix):
        logits = super().__call__(prefix)
        last = {1: len(THREE[0]) + 2, 0: len(THREE[1]) + 1, 2: 0}[prefix[0]]  # the prefill's token comes before them
        return logits if len(prefix) <= last else torch.where(logits == logits.max(), logits, -torch.inf)


@pytest.fixture
def lengths(monkeypatch):
    """The lengths of all accepted paths, the root counted, by row."""
    seen = set()

    def spied(*args, **kwargs):
        verdict = walk(*args, **kwargs)
        seen.update(enumerate(verdict.length.tolist()))
        return verdict

    monkeypatch.setattr(step, "walk", spied)
    return seen


def is_drawn(plan):
    return isinstance(plan, SampledTree) or getattr(plan, "sampled", False)


def tables(plan, prompts, seed):
    """Target and draft. Where a draft is drawn, or rows are several, one token of three has no chance at all."""
    drawn, several = is_drawn(plan), len(prompts) > 1
    target = (Narrow if several else Table)(V, seed, holes=drawn or several)
    return target, (Narrow if several and drawn else Table)(V, seed + 50, holes=drawn)


def error(make, rule, plan, prompts, seed=1, *, steps=None):
    """How far the joint distribution of three tokens a row is from the target's; make(table) is the drafter."""
    target, draft = tables(plan, prompts, seed)
    steps = 1 if is_drawn(plan) or len(prompts) > 1 else steps
    probs = output_probs(target, None, plan, prompts, LENGTH, accept=rule, drafter=make(draft), steps=steps)
    return distance(probs, true_probs(target, prompts, LENGTH))


@pytest.mark.parametrize("prompts", [ALONE, THREE], ids=len)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", GROWING)
@pytest.mark.sampled(3)
def test_what_grows_a_tree_is_lossless_under_every_lossless_rule(drafter_of, lengths, drafter, rule, shape, prompts):
    make = partial(drafter_of, drafter)
    if (rule, shape) == ("block", "sampled tree"):
        with pytest.raises(ValueError, match="Block"):
            error(make, RULES[rule], SHAPES[shape], prompts)
        return
    assert error(make, RULES[rule], SHAPES[shape], prompts) < 1e-12
    assert {0, 1} <= {length > 1 for row, length in lengths if row == 0}, "not both accepted and rejected"


@pytest.mark.parametrize("prompts", [ALONE, THREE], ids=len)
@pytest.mark.parametrize("shape", ["chain", "comb", "sampled tree"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", COPYING)
@pytest.mark.sampled(5)
def test_what_copies_runs_is_lossless_under_every_lossless_rule(drafter_of, lengths, drafter, rule, shape, prompts):
    """Of a plan it reads the size alone, so one plan of each size is all there are."""
    assert error(partial(drafter_of, drafter), RULES[rule], SHAPES[shape], prompts) < 1e-12
    assert {0, 1} <= {length > 1 for _, length in lengths}, "not both accepted and rejected"


# --- The enumeration notices what is broken, in the very cases above ---


class Flat(SampledTree):
    """Its nodes carry another distribution than they were drawn from."""

    def grow(self, *args):
        tree = super().grow(*args)
        return replace(tree, probs=torch.full_like(tree.probs, 1 / V))


class Anticipating(AdaptiveChain):
    """Whether a token is drafted depends on which token it would be: an unsure one is left out."""

    def grow(self, *args):
        tree = super().grow(*args)
        last = tree.max_depth
        unsure = tree.probs[:, last].gather(1, tree.tokens[:, last:]).squeeze(1) < self.confidence
        last -= bool(unsure.all())
        return DraftTree(tree.tokens[:, : last + 1], tree.parents[:, : last + 1], last, tree.probs[:, : last + 1])


@pytest.mark.parametrize("drafter", GROWING)
@pytest.mark.parametrize("rule", ["exact", "block", "traversal"])
def test_a_wrong_residual_a_wrong_q_and_a_stop_that_anticipates_are_noticed(drafter_of, drafter, rule):
    make, judge = partial(drafter_of, drafter), RULES[rule]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("exact", "block"):
            patch.setattr(f"specheads.decoding.acceptance.{name}.residual", lambda p, q: p)
        assert error(make, judge, SAMPLED["sampled chain"], ALONE) > 1e-3
    assert error(make, judge, Flat((1, 1)), ALONE) > 1e-3
    plan = SAMPLED["adaptive, sampled"]
    assert error(make, judge, Anticipating(plan.max_depth, plan.confidence, sampled=True), ALONE) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_point_mass_that_is_drawn_for_twice_is_noticed(drafter_of, monkeypatch, drafter, rule):
    """Where the token drawn is no child, another is drawn: what n-gram drafting published elsewhere does."""

    def twice(target, token, finite):
        verdict = follow_tokens(target, token, finite)
        last = verdict.path.gather(1, verdict.last.unsqueeze(1)).squeeze(1)
        return replace(verdict, bonus=target.sampler.draw(target.p_at(last)))

    monkeypatch.setattr("specheads.decoding.acceptance.exact.follow_tokens", twice)
    monkeypatch.setattr(Exact, "bonus_weights", lambda self, target, node: target.p_at(node))
    assert error(partial(drafter_of, drafter), RULES[rule], SHAPES["chain"], ALONE, steps=1) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_take_one_anothers_tokens_are_noticed(drafter_of, monkeypatch, rule):
    def mixed(*args, **kwargs):
        verdict = walk(*args, **kwargs)
        return replace(verdict, bonus=verdict.bonus.roll(1))

    monkeypatch.setattr(step, "walk", mixed)
    make = partial(drafter_of, "head")
    assert error(make, RULES[rule], SHAPES["chain"], THREE) > 1e-3
    assert error(make, RULES[rule], SHAPES["chain"], ALONE) < 1e-12  # one row cannot show it
