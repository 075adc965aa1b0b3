"""generate() at its limits: the last position of a model, drafts that nobody could use, and plans of absurd sizes."""

import resource

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import specheads
from specheads import (
    AdaptiveChain,
    BestFirstTree,
    DraftModel,
    DynamicTree,
    NGram,
    PromptLookup,
    SampledTree,
    StaticTree,
    chain,
    comb,
    convert,
)  # fmt: skip
from specheads.decoding.drafters.assistant import ScheduledChain
from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.planner import NoDraft, default_static, limit_depth, tree_named
from specheads.decoding.planner.plan import RecordDraftLogits
from tests.support.families import build
from tests.support.prompts import BATCHES
from tests.support.replay_drafter import Replay

OPTIONS = {"do_sample": False, "max_length": 41}
PLANS = {
    "default": None, "chain": chain(5), "comb": comb(4, 2), "dynamic": DynamicTree(12, 4, 3),
    "best first": BestFirstTree(12, 4, 3), "adaptive": AdaptiveChain(6, 0.0), "sampled": SampledTree((2, 1, 1)),
    "static": StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
}  # fmt: skip


@pytest.fixture(scope="module", params=["GPT2Config", "OPTConfig"])
def short(request):
    """A base of 40 learned positions."""
    options = {"n_positions": 40} if request.param == "GPT2Config" else {"word_embed_proj_dim": 32}
    return build(request.param, {"max_position_embeddings": 40, **options})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("head", ["medusa", "eagle3"])
@pytest.mark.sampled(3)
def test_a_text_may_be_one_token_longer_than_the_positions(short, head, plan):
    """Its last token is never fed."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    expected = short.generate(ids, attention_mask=mask, **OPTIONS)
    assert expected.shape[1] == 41
    model = convert(short, head, **({"num_heads": 6} if head == "medusa" else {}))
    assert torch.equal(model.generate(ids, attention_mask=mask, tree=PLANS[plan], **OPTIONS), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_so_may_that_of_a_draft_model(short, plan):
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = short.generate(ids, **OPTIONS)
    out = specheads.generate(short, ids, draft=DraftModel(short), tree=PLANS[plan], **OPTIONS)
    assert torch.equal(out, expected)


def test_so_may_that_of_an_encoder_decoder():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}  # fmt: skip
    base = BartForConditionalGeneration(BartConfig(vocab_size=97, max_position_embeddings=40, init_std=0.6, **sizes))
    base = base.eval()
    base.generation_config.eos_token_id = base.generation_config.forced_eos_token_id = None
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    expected = base.generate(ids, num_beams=1, **OPTIONS)
    assert expected.shape[1] == 41
    for drafter in (DraftModel(base), PromptLookup(8)):
        assert torch.equal(specheads.generate(base, ids, num_beams=1, draft=drafter, **OPTIONS), expected)


# --- Drafts beyond what is left ---


class Watched:
    """A drafter that keeps how deep each of its trees was."""

    def __init__(self, drafter):
        self.drafter, self.layers, self.depths = drafter, drafter.layers, []

    def default_plan(self, device, do_sample):
        return self.drafter.default_plan(device, do_sample)

    def propose(self, context, sampler, plan):
        tree = self.drafter.propose(context, sampler, plan)
        assert tree.max_depth <= plan.depth and tree.num_nodes <= plan.num_nodes
        self.depths.append(int(tree.topology.depth.max()))
        return tree


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("left", range(1, 8))
@pytest.mark.sampled(3)
def test_nothing_is_drafted_beyond_what_is_left(model, plan, left):
    """A step drafts no deeper than the row with the most room could use, whatever the drafter and the plan are."""
    inputs, options = BATCHES["ragged"], {"do_sample": False, "max_new_tokens": left, "eos_token_id": None}
    expected = model.base.generate(**inputs, **options)
    for drafter in map(Watched, (model.head, DraftModel(model.base), PromptLookup(6))):
        out = model.generate(**inputs, **options, draft=drafter, tree=PLANS[plan], return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        gained = [1] * len(expected)
        assert len(drafter.depths) >= len(out.steps) - 2, "the last step may need none"
        for step, depth in zip(out.steps[1:], [*drafter.depths, 0], strict=False):
            assert depth <= left - min(gained) - 1, "deeper than any row has room for"
            gained = [n + len(row) for n, row in zip(gained, step.tokens, strict=True)]


LIMITED = [
    *filter(None, PLANS.values()),
    ScheduledChain(8, 0.0, length=5),
    RecordDraftLogits(chain(5)),
    tree_named("best:20,6,4"),
]


def test_a_limited_plan_is_the_plan_less_deep():
    for plan in LIMITED:
        for depth in range(plan.depth + 2):
            made = limit_depth(plan, depth)
            assert made.depth == min(depth, plan.depth) and 1 <= made.num_nodes <= plan.num_nodes
            assert (made is plan) == (depth >= plan.depth) and isinstance(made, NoDraft) == (depth == 0)
            assert made is plan or made.drafting_slots == max(plan.drafting_slots, plan.depth + 1), (
                "room for what follows"
            )


# --- Absurd plans ---


def test_an_absurd_plan_is_refused_with_the_bound_before_memory_is_taken():
    for make, bound in [
        (lambda: tree_named("chain:5000"), "depth=5000 must be at most 1023"),
        (lambda: tree_named("comb:1000,1000"), "must be at most 1023"),
        (lambda: tree_named(f"chain:{10**12}"), "must be at most 1023"),
        (lambda: DynamicTree(60, 10**12, 10), "must be at most 1023"),
        (lambda: DynamicTree(60, 7, 10**9), "must be at most 8192"),
        (lambda: DynamicTree(10**9, 7, 1000), "must be 2 to 1024"),
        (lambda: BestFirstTree(10**12), "2 .the root and a draft. to 1024"),
        (lambda: BestFirstTree(64, 10**12), "must be at most 1023"),
        (lambda: BestFirstTree(64, 8, 10**12), "must be at most 1023"),
        (lambda: SampledTree((10**6, 10**6)), "must be at most 1023"),
        (lambda: SampledTree((1,) * 10**6), "must be at most 1023"),
        (lambda: AdaptiveChain(10**12), "must be at most 1023"),
        (lambda: StaticTree(tuple((i,) for i in range(2000))), "1023 at most"),
        (lambda: PromptLookup(10**12), "must be at most 1023"),
        (lambda: PromptLookup(64, width=10**9), "must be at most 1023"),
        (lambda: chain(1024), "must be at most 1023"),
    ]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=bound):
            make()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_a_size_that_is_no_whole_number_is_refused():
    for make, given in [
        (lambda: chain("5"), "depth='5'"),
        (lambda: chain(2.5), "depth=2.5"),
        (lambda: comb(3, "2"), "width='2'"),
        (lambda: comb("3"), "depth='3'"),
        (lambda: DynamicTree("20"), "budget='20'"),
        (lambda: DynamicTree(20, 5, 2.5), "top_k=2.5"),
        (lambda: BestFirstTree("20"), "budget='20'"),
        (lambda: BestFirstTree(20, 5, "7"), "width='7'"),
        (lambda: SampledTree((2, "2")), "each entry of branches='2'"),
        (lambda: AdaptiveChain("7"), "max_depth='7'"),
        (lambda: default_static(16, 2.5), "draft_depth=2.5"),
        (lambda: default_static(16, True), "draft_depth=True"),
        (lambda: default_static("16", 5), "nodes='16'"),
    ]:
        with pytest.raises(TypeError, match=rf"^{given} must be a whole number$"):
            make()


def test_one_number_for_the_levels_of_a_sampled_tree_is_refused():
    with pytest.raises(TypeError, match=r"^branches=3 must be a number for each level, such as \(2, 2, 1\)$"):
        SampledTree(3)


def test_an_option_of_the_wrong_kind_is_refused_where_it_is_given():
    for make, message in [
        (lambda: StaticTree(((0.5,),)), r"choices=\(\(0.5,\),\) must be paths of ranks, for instance \(\(0,\)"),
        (lambda: StaticTree(((True,),)), r"choices=\(\(True,\),\) must be paths"),
        (lambda: StaticTree((0, 1)), r"choices=\(0, 1\) must be paths"),
        (lambda: StaticTree(4), "choices=4 must be paths"),
        (lambda: AdaptiveChain(confidence="0.4"), "confidence='0.4' must be a number"),
        (lambda: AdaptiveChain(confidence=True), "confidence=True must be a number"),
        (lambda: NGram(storage=3), "storage=3 must be an NGramStorage"),
        (lambda: AutoDrafter(costs="costs.json"), "costs='costs.json' is no table of costs; give CostTable.load"),
        (lambda: AutoDrafter(compiled_costs=2.5), "compiled_costs=2.5 is no table of costs"),
    ]:
        with pytest.raises(TypeError, match=message):
            make()


def test_the_largest_plan_there_is_decodes(model):
    inputs = BATCHES["one"]
    expected = model.base.generate(**inputs, do_sample=False, max_new_tokens=20)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=20, tree=chain(1023), draft=DraftModel(model.base))
    assert torch.equal(out, expected)
    assert Replay(inputs, expected).plan.limited(1).depth == 1
