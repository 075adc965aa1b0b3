"""draft="auto": the target's text whatever the costs, and decisions by costs and tokens alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from transformers.utils import logging

import specheads
from specheads import DraftTree, PromptLookup, chain
from specheads.decoding.drafters import auto
from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.drafters.lookup import longest_match, to_text
from specheads.decoding.drafters.pending import PendingFeatures, overlay
from specheads.decoding.planner.by_cost import CostTable, Curve, step_planner
from specheads.decoding.planner.by_cost.step_planner import Choice
from specheads.models.costs import cost_key, cost_path
from tests.support.auto_costs import DEAR, FREE, HEADS, ONE, OPTIONS, Trained, table
from tests.support.prompts import padded
from tests.support.seq2seq_models import tiny_t5

PROMPTS = padded([[7, 8, 9, 7, 8], [31], [5, 5, 60, 61, 5, 5, 60]])


@pytest.fixture(scope="module")
def heads():
    return Trained()


def generate(model, costs, inputs=PROMPTS, **options):
    return specheads.generate(model.base, **inputs, **(OPTIONS | options), draft=AutoDrafter(model.head, costs))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("head", HEADS)
def test_the_text_is_that_of_plain_decoding_whatever_the_costs(heads, head, costs):
    model = heads[head]
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
        for inputs in (ONE, PROMPTS):
            plain = specheads.generate(model.base, **inputs, **OPTIONS, **options)
            out = generate(model, costs, inputs, **options)
            assert torch.equal(out.sequences, plain.sequences)
            assert costs is DEAR or sum(sum(step.drafted) for step in out.steps) > 0


def test_the_same_costs_give_the_same_drafts_and_others_do_not(heads):
    def drafts(costs):
        out = generate(heads["eagle3"], costs, do_sample=True, seed=1)
        return [(step.drafted, step.accepted) for step in out.steps]

    assert drafts(FREE) == drafts(FREE) != drafts(DEAR)


def test_a_head_reads_the_prompt_if_the_rest_of_the_text_pays_for_it(heads):
    free = FREE.batches[1]
    slow_reader = CostTable(None, {1: replace(free, read=Curve(((1, 0.3), (8, 0.3), (16, 20.0))))})  # 40 ms for 24
    prompt = padded([list(range(72, 96))])  # what is written after it does not occur in it

    def drafted(**options):
        steps = generate(heads["eagle3"], slow_reader, prompt, do_sample=False, **options).steps
        return [sum(step.drafted) for step in steps]

    for compiled in (False, "eager"):
        assert drafted(compile=compiled)[1] > 0, "the first step is the prompt's own"
        assert drafted(compile=compiled, max_new_tokens=10)[1] == 0, "they take 40 ms without the head"


def test_a_head_is_expected_to_be_right_less_often_where_tokens_are_sampled(heads):
    # A chain of two makes a step 1.86 times as long; it promises 1.96 tokens of greedy text, or 1.77 sampled ones.
    step = table(per_node=1.62, level=0.1)
    prompt = padded([list(range(72, 96))])  # what is written after it does not occur in it

    def drafted(**options):
        return generate(heads["eagle3"], step, prompt, compile="eager", **options).steps[1].drafted

    assert drafted(do_sample=False) == [2] and drafted(do_sample=True, seed=1) == [0]


def test_it_is_the_default_and_a_tree_or_a_rule_asks_for_the_head(heads, hf_log, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    logging.warning_once.cache_clear()
    model, options = heads["eagle3"], {**ONE, **OPTIONS}

    def drafts(**more):
        return [step.drafted for step in model.generate(**options, **more).steps]

    default = drafts()
    assert default == drafts(draft="auto") == drafts(draft=AutoDrafter(model.head))
    (record,) = [r for r in hf_log.records if "bundled step costs of a 9.9M-parameter model in float32" in r.message]
    assert "`specheads tune MODEL`" in record.message, "said once"
    assert default != drafts(draft="head") == drafts(draft=True)
    assert drafts(tree="chain:2") == drafts(draft="head", tree="chain:2") == drafts(draft="auto", tree="chain:2")
    assert drafts(accept="typical") == drafts(draft="head", accept="typical")
    FREE.save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"other\.json holds costs for base None, not "):
        drafts(draft=f"auto:{tmp_path / 'other.json'}")
    replace(FREE, key=cost_key(model.base, model.head)).save(cost_path(cost_key(model.base, model.head)))
    assert drafts() == drafts(draft=AutoDrafter(model.head, FREE)) != default


def test_a_missing_file_of_costs_is_an_error_whatever_else_is_asked_for(heads):
    for asked in [{}, {"tree": chain(2)}, {"accept": "typical"}]:
        with pytest.raises(FileNotFoundError, match=r"absent\.json"):
            heads["medusa"].generate(**PROMPTS, draft="auto:absent.json", max_new_tokens=3, **asked)


def test_an_encoder_decoder_drafts_copies():
    base = tiny_t5()
    options = {**ONE, "max_new_tokens": 30, "do_sample": False}
    assert torch.equal(specheads.generate(base, **options, draft="auto"), specheads.generate(base, **options))


def test_without_a_head_it_copies(heads):
    base = heads["eagle3"].base
    for draft in ("auto", AutoDrafter(costs=FREE)):
        out = specheads.generate(base, **PROMPTS, **OPTIONS, draft=draft)
        assert torch.equal(out.sequences, base.generate(**PROMPTS, **{**OPTIONS, "do_sample": False}).sequences)
        assert sum(sum(step.accepted) for step in out.steps) > 0


def test_a_head_that_pays_in_long_texts_alone_reads_no_short_ones(heads, monkeypatch):
    def verify(plain):
        return Curve(((1, plain), (64, plain + 189.0)))  # three milliseconds a node

    flat, read = Curve(((1, 0.0),)), []
    costs = replace(FREE.batches[1], verify={0: verify(4.0), 64: verify(40.0)}, read=Curve(((1, 11.0),)), level=flat)
    add = PendingFeatures.add
    monkeypatch.setattr(PendingFeatures, "add", lambda *given: [read.append(given), add(*given)])
    for count in (20, 80):  # after seven of the prompt
        read.clear()
        generate(heads["eagle3"], CostTable(None, {1: costs}), ONE, max_new_tokens=count, do_sample=False)
        assert bool(read) == (count == 80)


def test_copies_take_the_place_of_a_tree_where_there_are_some():
    tree = DraftTree(torch.tensor([[1, 2, 3], [1, 4, 5]]), torch.tensor([[-1, 0, 0], [-1, 0, 0]]), 1)
    both = overlay(tree, torch.tensor([[1, 9, 8, 1], [1, 1, 1, 1]]), torch.tensor([2, 0]))
    assert both.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, 0, -1]]
    assert both.tokens[:, :3].tolist() == [[1, 9, 8], [1, 4, 5]] and both.max_depth == 3 and not both.is_chain


@pytest.mark.slow
@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_a_head_accepts_in_the_graph_what_it_does_without(heads, head, monkeypatch):
    """Each step drafts otherwise, copies in some rows beside the head's trees: the steps are equal one by one."""
    calls = itertools.count()

    def fickle(candidates, head_gains, copy_gains, step_ms, draft_ms, value):
        rows = len(copy_gains)
        if not head_gains:  # what it would be without the head
            return Choice(0, 1, (False,) * rows, rows, 9.0)
        number = next(calls)
        depth = candidates.chains[-(number // 3 % 2)]  # the shortest chain or the longest
        if (kind := number % 3) == 0:
            return Choice(0, candidates.sizes[-1], (True,) * rows, rows, 1.0)
        return Choice(depth, 1 + depth, tuple((b + kind) % 2 == 0 for b in range(rows)), rows, 1.0)

    monkeypatch.setattr(step_planner, "choose", fickle)
    make_candidates = auto.make_candidates
    monkeypatch.setattr(auto, "make_candidates", lambda *args, **kw: make_candidates(*args, **{**kw, "compiled": True}))
    steps = []
    for compile in (False, "eager"):
        calls = itertools.count()
        out = generate(heads[head], FREE, compile=compile)
        steps.append([(step.drafted, step.accepted) for step in out.steps][:10])
    assert steps[0] == steps[1] and sum(sum(accepted) for _, accepted in steps[0]) > 10


def test_a_copy_goes_by_what_was_copied_in_its_own_row(heads, monkeypatch):
    rows = []

    class Spy(step_planner.CopyEstimate):
        def __init__(self):
            super().__init__()
            self.matches = []
            rows.append(self)

        def gains(self, match, count):
            self.matches.append(match)
            return super().gains(match, count)

    monkeypatch.setattr(step_planner, "CopyEstimate", Spy)
    out = generate(heads["eagle3"], FREE, eos_token_id=97)
    for b, row in enumerate(rows):
        text, matches = PROMPTS["input_ids"][b][PROMPTS["attention_mask"][b] == 1].tolist(), []
        for step in out.steps:
            text += step.tokens[b]
            matches.append(longest_match(to_text(text), auto.LONGEST_MATCH))
        assert row.matches == matches[: len(row.matches)] and len(set(row.matches)) > 2
    assert len(rows) == 3


def test_what_a_row_gains_counts_by_what_the_others_still_need(heads, monkeypatch):
    values = []

    class Spy(step_planner.BatchValue):
        def __init__(self, rows, remaining=()):
            super().__init__(rows, remaining)
            values.append((rows, list(remaining)))

    monkeypatch.setattr(step_planner, "BatchValue", Spy)
    base, head = heads["eagle3"].base, heads["eagle3"].head
    out = generate(heads["eagle3"], FREE)
    left = [47] * len(PROMPTS["input_ids"])
    for step, value in zip(out.steps[1:], [value for value in values if value[1]], strict=True):
        assert value == (sum(map(bool, left)), [n for n in left if n])
        left = [0 if 96 in new else n - len(new) for n, new in zip(left, step.tokens, strict=True)]
    values.clear()
    prompts, limits = [[5, 5, 60], [60, 61, 5, 5], [5, 60, 60], [5, 5]], [40, 8, 40, 8]
    many = {"batch_size": 3, "max_new_tokens": limits, "do_sample": False, "eos_token_id": 96}
    list(specheads.generate_many(base, prompts, draft=AutoDrafter(head, FREE), **many))
    queue_pending = [(rows, not remaining) for rows, remaining in values]
    assert (3, True) in queue_pending and (2, False) in queue_pending and not {(3, False), (2, True)} & {*queue_pending}


def test_a_drafter_that_must_see_every_step_is_refused():
    with pytest.raises(ValueError, match="AutoDrafter lets its drafter miss steps, and NGram reads the target's likel"):
        AutoDrafter(specheads.NGram())


def test_what_is_no_head_is_refused_in_the_place_of_one():
    for wrong, error, message in [
        (PromptLookup(), ValueError, r"by their probabilities, and PromptLookup has none; leave it out"),
        (AutoDrafter(), ValueError, r"by their probabilities, and AutoDrafter has none; leave it out"),
        (PromptLookup, TypeError, r"head=PromptLookup is the class of a drafter; give one of its objects"),
        ("lookup", TypeError, "head=str cannot propose trees"),
        (torch.nn.Linear(1, 1), TypeError, r"head=Linear cannot .*, give DraftModel\(it\)$"),
    ]:
        with pytest.raises(error, match=message):
            AutoDrafter(wrong)
