"""output_divergences=True: D at every drafted position, by step, for chains and trees, as the rule judges by it."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

import specheads
from specheads import DraftModel, DraftTree, DynamicTree, Exact, Fuzzy, SampledTree, Sampler, StaticTree, chain, convert
from specheads.decoding.acceptance import walk
from specheads.decoding.acceptance.divergences import divergence
from specheads.decoding.planner.plan import RecordDraftLogits
from specheads.decoding.tree.draft_logits import DraftLogits
from tests.reference.enumeration import Table, TableDrafter, TableTarget
from tests.support.prompts import BATCHES, PAD
from tests.support.tiny_models import near, tiny_llama

PLANS = {
    "chain": chain(4), "static": StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), "dynamic": DynamicTree(6, 3, 2),
    "sampled": SampledTree((2, 2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    base = tiny_llama(num_hidden_layers=3, eos_token_id=None)
    return base, near(base)


def options(small, plan, rule, **more):
    return {
        "draft": DraftModel(small), "tree": plan, "accept": rule, "return_dict_in_generate": True, "do_sample": False,
        "max_new_tokens": 21, "output_divergences": True, "seed": 5, **more,
    }  # fmt: skip


def logits_after(model, ids):
    return model(torch.tensor([ids])).logits[0, -1:].double()


@torch.no_grad()
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ["js_paper", "top_k_js"])
@pytest.mark.sampled(3)
def test_a_chains_divergences_are_those_of_the_two_models_along_its_text(pair, name, do_sample):
    """Asked of the models themselves: at each accepted position, and at the first that is not."""
    base, small = pair
    inputs = BATCHES["ragged"]
    rule = Fuzzy(0.05, name)
    out = specheads.generate(base, **inputs, **options(small, chain(4), rule, do_sample=do_sample))
    seen = passed_by_chance = 0
    for b, mask in enumerate(inputs["attention_mask"].bool()):
        ids = inputs["input_ids"][b][mask].tolist()
        for step in out.steps:
            assert step.divergences == [] or len(step.divergences[b]) == step.drafted[b] == len(step.parents[b])
            if step.divergences:
                assert step.parents[b] == list(range(step.drafted[b]))
                assert step.path[b] == list(range(1, step.accepted[b] + 1))
                for position in range(min(step.drafted[b], len(step.tokens[b]))):
                    prefix = ids + step.tokens[b][:position]
                    both = (logits_after(model, prefix) for model in (small, base))
                    wanted = float(divergence(name, *both, k=50, top_p=0.9))
                    assert step.divergences[b][position] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
                    seen += 1
                    passed_by_chance += position < step.accepted[b] and wanted > 0.05
                if 0 < step.accepted[b] < step.drafted[b] and len(step.tokens[b]) > step.accepted[b]:
                    assert step.divergences[b][step.accepted[b]] > 0.05
            ids += step.tokens[b]
    assert seen > 30 and passed_by_chance


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_node_of_a_tree_has_the_divergence_at_its_parent(plan, processed):
    target, draft = Table(6, 1), Table(6, 2)
    rows = [(0, 1), (3,)]
    sampler = Sampler(LogitsProcessorList([SuppressTokensLogitsProcessor([5])]), do_sample=plan == "sampled")
    sampler.generator = torch.Generator().manual_seed(0)

    class Context:
        history, root = [list(row) for row in rows], torch.tensor([row[-1] for row in rows])

    tree = TableDrafter(draft).propose(Context, sampler, RecordDraftLogits(PLANS[plan]))
    verifier = TableTarget(target)
    verifier.rows = [list(row[:-1]) for row in rows]
    logits = verifier.verify(tree).logits
    rule = Fuzzy(0.1, "tv", processed=processed)
    made = walk(tree, logits, rule, sampler, keep_divergences=True).divergences
    for b, row in enumerate(rows):
        prefixes = {0: row}
        for node, parent in enumerate(tree.parents[b].tolist()):
            if parent < 0:
                assert made[b, node].isnan()
                continue
            prefixes[node] = (*prefixes[parent], int(tree.tokens[b, node]))
            scores = [table(prefixes[parent]).clone().unsqueeze(0) for table in (draft, target)]
            for one in scores if processed else ():
                one[0, 5] = -torch.inf
            wanted = divergence("tv", *(one.log_softmax(-1) for one in scores), k=50, top_p=0.9)
            assert float(made[b, node]) == pytest.approx(float(wanted), abs=1e-9)


class Banned(SuppressTokensLogitsProcessor):
    """A kind of its own, so that it is asked at each node's own prefix."""


def test_below_a_token_that_a_processor_rules_out_there_is_none():
    rows = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    tree = DraftTree(
        torch.tensor([[1, 5, 2]]), torch.tensor([[-1, 0, 1]]), 2,
        logits=DraftLogits(rows.roll(1, 2), torch.tensor([[0, 1, 1]]), None, 6),
    )  # fmt: skip
    for banned, gone in (([5], True), ([4], False)):
        sampler = Sampler(LogitsProcessorList([Banned(banned)]))
        made = walk(tree, rows, Fuzzy(0.1, "tv", processed=True), sampler, [[1]], keep_divergences=True).divergences
        assert bool(made[0, 2].isnan()) == gone and made[0, 1] > 0


def test_none_is_measured_where_none_is_asked_for(pair, monkeypatch):
    def unasked(self, target):
        raise AssertionError("measured at every node")

    monkeypatch.setattr(Fuzzy, "divergences", unasked)
    base, small = pair
    specheads.generate(base, **BATCHES["one"], **options(small, chain(3), Fuzzy(0.3), output_divergences=False))
    with pytest.raises(AssertionError, match="measured"):
        specheads.generate(base, **BATCHES["one"], **options(small, chain(3), Fuzzy(0.3)))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "rule",
    [Fuzzy(0.2), Fuzzy(0.2, mode="rescue"), Fuzzy(0.4, "random"), Fuzzy(0.4, "random", "rescue"),
     Fuzzy(0, "random", "rescue")],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(3)
def test_asking_for_them_changes_no_text(pair, plan, rule, do_sample):
    base, small = pair
    made = [
        specheads.generate(
            base, **BATCHES["ragged"],
            **options(small, PLANS[plan], rule, output_divergences=asked, max_new_tokens=12, do_sample=do_sample),
        )
        for asked in (True, False)
    ]  # fmt: skip
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert [step.accepted for step in made[0].steps] == [step.accepted for step in made[1].steps]
    assert made[0].steps[1].divergences and made[1].steps[1].divergences == []
    assert "divergence_by_depth" not in made[1].statistics()


def test_random_accepts_by_the_number_it_reports(pair):
    """Greedy rescue: a token is accepted where Exact accepts it or its number is below the threshold."""
    base, small = pair
    rule = Fuzzy(0.4, "random", "rescue")
    out = specheads.generate(base, **BATCHES["one"], **options(small, chain(3), rule, max_new_tokens=40))
    drawn = [value for step in out.steps[1:] for value in step.divergences[0]]
    assert len(set(drawn)) == len(drawn) and min(drawn) >= 0 and max(drawn) < 1
    ended = [(step.divergences[0], step.accepted[0]) for step in out.steps[1:] if step.accepted[0] < step.drafted[0]]
    assert ended and all(row[taken] >= 0.4 for row, taken in ended[:-1])


def test_a_trees_path_and_parents_lead_through_its_divergences(pair):
    base, small = pair
    out = specheads.generate(base, **BATCHES["ragged"], **options(small, PLANS["static"], Fuzzy(0.3)))
    lengths = set()
    for step in out.steps[1:]:
        for values, parents, path, taken in zip(step.divergences, step.parents, step.path, step.accepted, strict=True):
            assert len(values) == len(parents) and len(path) == taken
            assert [parents[node - 1] for node in path] == [0, *path][: len(path)]
            assert all(parent < node for node, parent in enumerate(parents, start=1))
            for one, parent in enumerate(parents):  # siblings share one
                assert values[one] == values[parents.index(parent)]
            lengths.add(taken)
    assert len(lengths) > 2
    means = out.statistics()["divergence_by_depth"]
    first = [row[0] for step in out.steps[1:] for row in step.divergences if row]
    wide = [
        value
        for step in out.steps[1:]
        for values, parents in zip(step.divergences, step.parents, strict=True)
        for value, parent in zip(values, parents, strict=True)
        if parent == 0
    ]
    assert len(means) == 3 and means[0] == pytest.approx(sum(wide) / len(wide)) and set(first) <= set(wide)


def test_a_row_that_has_ended_has_none(pair):
    base, small = pair
    free = base.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=30, pad_token_id=PAD)
    end = int(free[0, BATCHES["ragged"]["input_ids"].shape[1] + 3])
    more = {"max_new_tokens": 30, "eos_token_id": end, "pad_token_id": PAD}
    out = specheads.generate(base, **BATCHES["ragged"], **options(small, chain(3), Fuzzy(0.01), **more))
    rows = [
        (row, drafted) for step in out.steps[1:] for row, drafted in zip(step.divergences, step.drafted, strict=True)
    ]
    assert all(len(row) == drafted for row, drafted in rows) and any(drafted == 0 for _, drafted in rows)


def test_a_rescue_at_0_reads_no_draft_distribution_but_to_report_it(pair):
    base, small = pair
    rule = Fuzzy(0, mode="rescue")
    out = specheads.generate(base, **BATCHES["one"], **options(small, chain(3), rule))
    assert out.lossless and all(0 <= value < math.log(2) for step in out.steps[1:] for value in step.divergences[0])


def test_a_heads_model_reports_them_too(base):
    torch.manual_seed(0)
    model = convert(base, "eagle3", draft_vocab_size=50)
    more = {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 9}
    out = model.generate(**BATCHES["one"], **more, tree=chain(3), accept=Fuzzy(0.3), output_divergences=True)
    assert all(len(step.divergences[0]) == step.drafted[0] for step in out.steps[1:])
    assert len(out.statistics()["divergence_by_depth"]) == 3


def test_asking_where_nothing_could_come_back_is_refused(pair):
    for more, message in [
        ({"accept": Exact()}, "output_divergences=True is for accept=Fuzzy(...)"),
        ({"accept": None}, "output_divergences=True is for accept=Fuzzy(...)"),
        ({"return_dict_in_generate": False}, "give return_dict_in_generate=True too"),
    ]:
        base, small = pair
        with pytest.raises(ValueError) as caught:
            specheads.generate(base, **BATCHES["one"], **options(small, chain(3), Fuzzy(0.3), **more))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_sampled_tree_with_fewer_tokens_than_branches_reports_its_real_nodes():
    """Two tokens are possible at each node and four are asked for: the slots below an empty one are empty too."""
    base = tiny_llama()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    out = specheads.generate(
        base, ids, attention_mask=torch.ones_like(ids), draft=DraftModel(tiny_llama()), tree=SampledTree((4, 2)),
        accept=Fuzzy(0.1), do_sample=True, top_k=2, seed=1, max_new_tokens=12, return_dict_in_generate=True,
        output_divergences=True,
    )  # fmt: skip
    drafting = [step for step in out.steps[1:] if step.drafted[0] == 2 + 2 * 2]
    assert drafting and all(step.parents[0] == [0, 0, 1, 1, 2, 2] for step in drafting)
