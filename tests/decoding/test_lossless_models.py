"""Real models three rows at a time: sampled text has the base's joint distribution, by enumeration and by a G-test."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import specheads
from specheads import Block, DraftModel, Exact, NGram, NGramStorage, SampledTree, Target, Traversal, chain, convert
from specheads.decoding import step as step_module
from specheads.decoding.loop import decode
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of
from tests.support.families import RECURRENT, build
from tests.support.prompts import padded
from tests.support.tiny_models import near

PROMPTS = [(1,), (1, 0, 1, 0), (0, 1, 1)]
DFLASH = {"sample_from_anchor": False, "causal": False, "markov_rank": 0, "block_size": 3}


def drafter_of(name, base, vocab_size):
    torch.manual_seed(1)
    if name == "draft model":
        return DraftModel(near(base, 0.3))
    if name == "n-grams":
        return NGram(2, storage=NGramStorage(3, vocab_size), filler_top_k=2)
    kind, options = ("parallel", DFLASH) if name == "dflash" else (name, {})
    head = convert(base, kind, dtype=base.dtype, **options).head
    for parameter in head.parameters():  # away from the base's own weights, so that q is unlike p
        torch.nn.init.normal_(parameter, std=0.5)
    return head


# --- Every outcome ---


@pytest.mark.parametrize(
    ("drafter", "plan", "rule"),
    [
        ("medusa", chain(1), Exact()),
        ("hydra", SampledTree((1,)), Exact()),
        ("eagle", SampledTree((1,)), Block()),
        ("eagle3", SampledTree((1,)), Traversal()),
        ("parallel", SampledTree((1,)), Exact()),
        ("dflash", SampledTree((1,)), Exact()),
        ("draft model", SampledTree((1,)), Traversal()),
        ("n-grams", chain(1), Exact()),
    ],
)
@pytest.mark.sampled(3)
def test_three_rows_have_the_bases_joint_distribution(drafter, plan, rule):
    """One step from trees, then the base's own distribution of three tokens a row; the prefill's token is certain."""
    check_joint_distribution(small_base(2), drafter, plan, rule, 1e-12)


@pytest.mark.sampled(3)
# All but convolutions compute in float32 whatever the model's dtype.
@pytest.mark.parametrize(("base", "close"), [("LFM2", 1e-12), ("Qwen3.5", 1e-5), ("Falcon-H1", 1e-5)])
def test_three_rows_of_a_recurrent_base_have_its_joint_distribution(base, close):
    config, options = RECURRENT[base]
    layers = {"num_hidden_layers": 2, "vocab_size": 2, "bos_token_id": None, "pad_token_id": None}
    if "layer_types" in options:
        layers["layer_types"] = options["layer_types"][:2]
    elif base == "Qwen3.5":
        layers["layer_types"] = ["linear_attention", "full_attention"]
    check_joint_distribution(build(config, {**options, **layers}).double(), "eagle3", SampledTree((1,)), Exact(), close)


def check_joint_distribution(base, drafter, plan, rule, close):
    own, base_probs, lengths = drafter_of(drafter, base, 2), BaseProbs(base), set()
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[*row, *(0,) * (width - len(row))] for row in PROMPTS])

    def run(sampler):
        drawn = sampler.draw
        sampler.draw = lambda p, numbers=None: torch.tensor([1, 0, 1])  # the prefill's
        rows, made = [()] * 3, decode(
            Target(base, own.layers, scratch=plan.num_nodes), own, ids, torch.tensor([*map(len, PROMPTS)]), plan=plan,
            sampler=sampler, accept=rule, stop=lambda row, history, count: -1, max_new_tokens=8,
        )  # fmt: skip
        for step in itertools.islice(made, 2):
            sampler.draw = drawn
            rows = [(*row, *gained) for row, gained in zip(rows, step.tokens, strict=True)]
        lengths.update(step.accepted)
        return tuple(rows)

    found, wanted = probs_of(run), {(): 1.0}
    for row, (prompt, first) in enumerate(zip(PROMPTS, (1, 0, 1), strict=True)):
        longer = {}
        for outcome, chance in found.items():
            for rest, p in base_probs.joint((*prompt, *outcome[row]), 3 - len(outcome[row])).items():
                key = (*outcome[:row], (*outcome[row], *rest), *outcome[row + 1 :])
                longer[key] = longer.get(key, 0.0) + chance * p
        found = longer
        own_probs = base_probs.joint((*prompt, first), 2)
        wanted = {(*rows, (first, *more)): a * b for rows, a in wanted.items() for more, b in own_probs.items()}
    assert distance(found, wanted) < close
    assert len(lengths) > 1, "not both accepted and rejected"


# --- A sample of 4,000 of each row ---

FALSE_ALARM = 1e-6  # of the whole test below, its cases and marginals together
VOCAB, COPIES, TOKENS = 4, 4000, 3


def g_tail(counts, probs):
    """The chance that a sample of that size from `probs` is as far from it as `counts` or farther: a G-test.

    G is distributed as chi-squared with one degree of freedom less than there are outcomes, here in the approximation
    of Wilson and Hilferty, which is good to a few per cent in the exponent where every outcome is expected often:
    those expected less than 10 times are counted as one.
    """
    total, drawn, expected = sum(counts.values()), Counter(), Counter()
    for key, p in probs.items():
        own = key if p * total > 10 else "rare"
        drawn[own] += counts[key]
        expected[own] += p * total
    assert sum(drawn.values()) == total and min(expected.values()) > 5
    g = 2 * sum(n * math.log(n / expected[key]) for key, n in drawn.items() if n)
    freedom = len(expected) - 1
    z = ((g / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2


def tails(base, drafter, plan, rule):
    """Tail chances of each row's 3-grams, and of neighbouring rows' second tokens, over many copies of three rows."""
    base_probs = BaseProbs(base.double())
    truth = [base_probs.joint(prompt, TOKENS) for prompt in PROMPTS]
    base.float()
    inputs = padded(PROMPTS * COPIES)
    out = specheads.generate(
        base, **inputs, draft=drafter, tree=plan, accept=rule, do_sample=True, top_k=0, seed=0, max_new_tokens=TOKENS
    )
    texts = [tuple(row) for row in out[:, -TOKENS:].tolist()]
    alone = [Counter(texts[row::3]) for row in range(3)]
    pairs = Counter((a[1], b[1]) for a, b in zip(texts[0::3], texts[1::3], strict=True))
    seconds = [Counter() for _ in range(2)]
    for row, counter in enumerate(seconds):
        for tokens, p in truth[row].items():
            counter[tokens[1]] += p
    product = {(a, b): p * q for a, p in seconds[0].items() for b, q in seconds[1].items()}
    return [*(g_tail(counts, own) for counts, own in zip(alone, truth, strict=True)), g_tail(pairs, product)]


CASES = [
    ("eagle3", SampledTree((2, 1)), Traversal()), ("draft model", SampledTree((1, 1)), Exact()),
    ("n-grams", chain(2), Exact()), ("parallel", SampledTree((2, 1)), Exact()),
]  # fmt: skip


@pytest.fixture(scope="module")
def base():
    model = small_base(VOCAB)
    with torch.no_grad():
        model.lm_head.weight *= 0.5  # no token so rare that it is hardly ever drawn
    return model.float()


@pytest.mark.parametrize(("drafter", "plan", "rule"), CASES)
@pytest.mark.sampled(2)
def test_a_sample_of_three_ragged_rows_has_the_bases_distribution(base, drafter, plan, rule):
    """Fails for a right program with probability FALSE_ALARM at most, shared evenly between cases and marginals."""
    found = tails(base, drafter_of(drafter, base, VOCAB), plan, rule)
    assert min(found) > FALSE_ALARM / (len(CASES) * len(found))


@pytest.mark.parametrize("broken", ["a residual that returns p", "rows mixed up"])
def test_the_sample_shows_what_is_broken(base, broken, monkeypatch):
    drafter, plan, rule = drafter_of("draft model", base, VOCAB), SampledTree((1, 1)), Exact()
    if broken == "rows mixed up":
        module = step_module
        walk = module.walk
        monkeypatch.setattr(module, "walk", lambda *args, **kwargs: shifted(walk(*args, **kwargs)))
    else:
        monkeypatch.setattr("specheads.decoding.acceptance.exact.residual", lambda p, q: p)
    assert min(tails(base, drafter, plan, rule)) < FALSE_ALARM / (4 * len(CASES))


def shifted(verdict):
    return replace(verdict, bonus=verdict.bonus.roll(1))
