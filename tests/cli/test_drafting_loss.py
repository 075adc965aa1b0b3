"""The line that says that drafting did not pay: its figure by sums of our own over the steps, and when it is silent."""

import json
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from specheads.cli.chat.session import Session
from specheads.cli.options.decode import ChatOptions
from specheads.decoding.drafters import AutoDrafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.planner import PLANS, as_plan
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from specheads.decoding.planner.plan import WrappedPlan
from specheads.models import payoff
from specheads.models.costs import cost_key, cost_path
from specheads.models.named import Models
from tests.support.command_line import run

LENGTH = 24
TREES = {"chain": "chain:4", "adaptive": "adaptive:3", "comb": "comb:2,3", "dynamic": "dynamic:9,2,3",
         "best": "best:8,3,2", "static": "static:8", "sampled": "sampled:2,2,1"}  # fmt: skip
NODE, PLAIN, LOOKUP = 5.0, 10.0, 0.5  # milliseconds: a further node, a plain step, a search


def table(node=NODE, lookup=LOOKUP):
    verify = {64: Curve(((1, PLAIN), (64, PLAIN + 63 * node)))}
    flat, read, level = Curve(((1, 0.0),)), Curve(((1, 2.0), (65, 66.0))), Curve(((1, 4.0), (65, 68.0)))
    return CostTable(None, {1: StepCosts(1, verify, flat, Curve(((1, lookup),)), read, level)})


@dataclass(frozen=True)
class Recorded(WrappedPlan):
    """A plan that records how many nodes are expanded in each level below the root of each tree."""

    levels: list = field(default_factory=list, compare=False)

    def grow(self, root, expand, sampler, vocab_size):
        self.levels.append([])

        def counted(tokens, above):
            self.levels[-1] += [tokens.shape[1]] if above is not None else []
            return expand(tokens, above)

        return self.plan.grow(root, counted, sampler, vocab_size)


@pytest.fixture(scope="module")
def models(shipped):
    return Models.load(str(shipped / "eagle3"), device="cpu")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A user's cache without costs of any step."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path


CPU = torch.device("cpu")


def written(models, drafter, plan=None, tree=None):
    """A text as `payoff` takes it; tree: what decodes instead of the plan."""
    ids = models.tokenizer("def f(x, y):", return_tensors="pt")
    options = {"max_new_tokens": LENGTH, "return_dict_in_generate": True}
    with payoff.watch_head() as uses:
        out = generate(models.target, **ids, **options, draft=drafter, tree=tree or plan)
    prompt = ids["input_ids"].shape[1]
    return payoff.Drafted(draft="", drafter=drafter, plan=plan, steps=out.steps, prompt=prompt, limit=LENGTH, uses=uses)


def by_hand(steps, drafting):
    """Plain decoding's time over that of these steps; drafting: milliseconds of each."""
    gained = sum(len(step.tokens[0]) for step in steps[1:])
    spent = sum(PLAIN + NODE * step.drafted[0] for step in steps[1:]) + sum(drafting)
    return PLAIN * gained / spent


def test_a_heads_trees_cost_what_their_levels_do(models):
    known = payoff.KnownCosts(table(), "")
    assert set(TREES) == set(PLANS)
    head = models.drafters["head"]
    for plan in map(as_plan, TREES.values()):
        recorded = Recorded(plan)
        text = written(models, head, plan, recorded)
        steps = text.steps
        unread = [1, *(len(step.tokens[0]) for step in steps[1:])]  # by the step after
        drafting, trees = [], iter(recorded.levels)
        for step, positions in zip(steps[1:], unread, strict=False):
            levels = next(trees) if step.drafted[0] else []
            drafting.append(1 + positions + sum(3 + nodes for nodes in levels))
        ratio = payoff.over_plain(text, known, CPU)
        assert ratio == pytest.approx(by_hand(steps, drafting)) and ratio < 1, plan
    assert payoff.over_plain(replace(text, plan=SimpleNamespace(depth=1)), known, CPU) is None, "a plan of one's own"


def test_copies_and_automatic_drafts_cost_a_search_and_the_passes_of_the_head(models, monkeypatch):
    lookup = models.drafter("lookup")
    text, known = written(models, lookup), payoff.KnownCosts(table(), "")
    assert any(step.drafted[0] for step in text.steps) and not text.uses
    ratio = payoff.over_plain(text, known, CPU)
    assert ratio == pytest.approx(by_hand(text.steps, [LOOKUP] * (len(text.steps) - 1)))

    head, passes = models.drafters["head"], []
    real = type(head).propose
    monkeypatch.setattr(
        type(head), "propose", lambda self, context, sampler, plan: (
            passes.append((plan.depth, int(context.new[0]))), real(self, context, sampler, plan)
        )[1],
    )  # fmt: skip
    auto = AutoDrafter(head, table(node=0.1))  # it drafts, though nothing of a random head is right
    text = written(models, auto)
    drafted = [(depth, positions) for depth, positions in passes if depth]
    assert drafted and drafted[0][1] >= text.prompt, "the head read the prompt first, which is left out"
    sums = [1 + (positions if i else 1) + 4 * (depth - 1) for i, (depth, positions) in enumerate(drafted)]
    ratio = payoff.over_plain(text, known, CPU)
    assert ratio == pytest.approx(by_hand(text.steps, [*sums, *[LOOKUP] * (len(text.steps) - 1)]))


def test_bundled_costs_count_only_where_steps_take_about_as_long(models):
    lookup = models.drafter("lookup")
    text = written(models, lookup)
    steps = text.steps
    mean = sum(PLAIN + NODE * step.drafted[0] + LOOKUP for step in steps[1:]) / 1e3 / (len(steps) - 1)  # seconds
    for times, counts in ((0.4, False), (0.6, True), (1.9, True), (2.1, False)):
        timed = replace(text, steps=[replace(step, seconds=mean * times) for step in steps])
        for bundled in (True, False):
            known = payoff.KnownCosts(table(), "", bundled)
            assert (payoff.over_plain(timed, known, CPU) is None) is (bundled and not counts)


def test_generate_and_chat_say_so_in_one_line_with_its_source(shipped, models, home, capsys):
    """Silent where nothing is known of the costs, and where drafting paid."""
    key = cost_key(models.target, models.drafters["head"])
    ask = ("generate", shipped / "eagle3", "--prompt", "def f(x, y):", "--max-new-tokens", LENGTH)
    shaped = ("--draft", "head", "--tree", "chain:2")
    replace(table(), key=key).save(cost_path(key))
    text = written(models, models.drafters["head"], as_plan("chain:2"))
    ratio = payoff.over_plain(text, payoff.KnownCosts(table(), ""), CPU)
    line = (
        f"drafting did not pay here: {ratio:.2f}× the speed of plain decoding by the costs in {cost_path(key)}; "
        "draft=auto alone decides step by step"
    )
    assert run(capsys, *ask, *shaped)[2].splitlines()[-1] == line
    session = Session(models, ChatOptions(model="", draft="head", tree="chain:2", chat=False, max_new_tokens=LENGTH))
    assert session.answer(session.ways()[0], "def f(x, y):", 0).loss == line
    said = "did not pay"
    assert said in run(capsys, *ask, "--draft", "lookup")[2], "the base costs the same beside its head"
    assert said not in run(capsys, *ask, "--draft", "none")[2]
    assert said not in run(capsys, *ask, "--draft", f"model:{shipped / 'base'}")[2], "nobody measured that model"
    assert said not in json.dumps(run(capsys, *ask, *shaped, "--json")[1])
    replace(table(node=0.001, lookup=0.0), key=key).save(cost_path(key))  # copies cost next to nothing
    assert said not in run(capsys, *ask, "--draft", "lookup")[2]
    automatic = replace(table(node=1.0), key=key)
    automatic.save(home / "auto.json")
    note = run(capsys, *ask, "--draft", f"auto:{home / 'auto.json'}")[2].splitlines()[-1]
    assert re.search(r"did not pay here: 0\.\d\d× .* by the costs in .*auto\.json; draft=none does not draft", note)
    cost_path(key).write_text("{")
    assert said not in run(capsys, *ask, *shaped)[2]
