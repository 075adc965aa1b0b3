"""The language of options: what a class says of its fields is what its text may hold."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specheads import DraftTree, NGram, NGramStorage, PromptLookup, SampledTree, chain
from specheads.decoding.acceptance import RULES, Exact
from specheads.decoding.drafters import DRAFTERS, as_drafter
from specheads.decoding.drafters.base import Drafter, with_defaults
from specheads.decoding.planner import BestFirstTree, as_plan, default_static, tree_named
from specheads.decoding.registry import Registry


@dataclass(frozen=True)
class Toy:
    size: int
    share: float = 0.5
    widths: tuple[int, ...] = (1,)
    fast: bool = False
    most: int | None = None


@dataclass(frozen=True)
class Filed:
    content: str

    @classmethod
    def from_text(cls, path: Path = Path("none"), *, suffix: str = "") -> "Filed":
        return cls(f"{path}{suffix}")


TOYS = Registry("toy", "toy", {"toy": Toy, "filed": Filed})


def test_a_text_is_the_object_it_names():
    for text, made in [
        ("toy:3", Toy(3)), ("toy:3:0.25", Toy(3, 0.25)), ("toy:3:0.5:4:5", Toy(3, 0.5, (4, 5))),
        ("toy:share=1:3", Toy(3, 1.0)), ("toy:3:most=9:fast=true", Toy(3, fast=True, most=9)),
        ("filed:a:b=c,d", Filed("a:b=c,d!")), ("filed", Filed("none!")), ("filed:", Filed("none!")),
    ]:  # fmt: skip
        assert TOYS.build(text, suffix="!") == made


def test_an_object_is_written_as_the_shortest_text_that_names_it():
    for toy in (Toy(3), Toy(3, 0.123456789), Toy(3, 0.5, (4, 5)), Toy(1, 0.2, (2,), True)):
        assert TOYS.build(TOYS.write(toy)) == toy
    assert TOYS.write(Toy(3)) == "toy:3" and TOYS.write(Toy(3, 0.25)) == "toy:3:0.25"
    assert TOYS.usage("toy") == "toy:SIZE[:SHARE[:WIDTHS,…]]" and TOYS.usage("filed") == "filed[:PATH]"
    with pytest.raises(ValueError, match="Exact is not a registered toy"):
        TOYS.write(Exact())


def test_a_text_that_names_nothing_is_refused_in_one_line():
    for text, said in [
        ("tog:1", "unknown toy 'tog'; did you mean 'toy'?"), ("toy", "size is missing"), ("toy:x", "size='x' is not a"),
        ("toy:1:size=2", "size is given twice"), ("toy:1:sizes=2", "did you mean 'size'"), ("toy:1:fast=1", "neither"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)) as refused:
            TOYS.build(text)
        assert repr(text) in str(refused.value) and "\n" not in str(refused.value)


def test_plans_take_commas_and_colons_and_any_field_by_name():
    assert tree_named("best:20,6,4") == tree_named("best:20:6:4") == BestFirstTree(20, 6, 4)
    assert tree_named("best:20,beams=3") == BestFirstTree(20, beams=3)
    assert tree_named("sampled:2,2,1") == SampledTree((2, 2, 1)) and tree_named("chain:4") == chain(4)
    assert tree_named("static:12") == default_static(12, 5) and tree_named("static", 3) == default_static(16, 3)


def test_drafters_take_their_options_as_text():
    assert DRAFTERS.build("lookup:5") == PromptLookup(5) == as_drafter("lookup:5")
    assert DRAFTERS.build("lookup:5:width=2:max_ngram=4") == PromptLookup(5, 2, 4)
    grams = DRAFTERS.build("ngram:4:filler_top_k=1", vocab_size=50)
    assert isinstance(grams, NGram) and isinstance(grams.storage, NGramStorage)
    assert (grams.storage.n, grams.storage.vocab_size, grams.filler_top_k) == (4, 50, 1)


def test_every_registered_name_is_spelled_by_its_usage_and_known_by_its_class():
    for name, rule in RULES.items():
        assert rule.name == name and RULES.usage(name).startswith(name) and RULES.usage(name) in RULES.expected


def test_a_drafter_that_states_the_least_gets_the_protocols_values():
    class Least:
        layers = ()
        wants_target_top = 2

        def default_plan(self, device, do_sample):
            return chain(1)

        def propose(self, context, sampler, plan):
            return DraftTree.root_only(context.root)

    class NoPlan:
        layers = ()

        def propose(self, context, sampler, plan):
            return DraftTree.root_only(context.root)

    class Broken(Least):
        fixed_depth = property(lambda self: self.nowhere)

    with pytest.raises(AttributeError, match="'NoPlan' object has no attribute 'default_plan'"):
        _ = with_defaults(NoPlan()).default_plan
    with pytest.raises(AttributeError, match="nowhere"):
        _ = with_defaults(Broken()).fixed_depth
    drafter = with_defaults(Least())
    assert (drafter.wants_target_top, drafter.reviews) == (2, ())
    assert drafter.fixed_depth is drafter.trained_length is None
    assert drafter.gives_draft_probs and drafter.default_plan(torch.device("cpu"), False) == chain(1)
    assert as_plan("static", drafter) == default_static(16, 5) and not isinstance(Least(), Drafter)
    assert with_defaults(whole := PromptLookup()) is whole
