"""Claims of an audit about servers on a tiny model: the right one passes, and each fault is found within the tokens
that the power promises for its total variation."""

import json
import math

import pytest
import torch

from specheads.audit.bets import BET_NAMES
from specheads.audit.clients.client import InProcess, Place, places_of
from specheads.audit.evidence import tokens_to_find
from specheads.audit.run import audit
from specheads.audit.scoring import Scorer
from specheads.audit.settings import Settings
from specheads.audit.verdict import Verdict
from specheads.audit.watch import AuditConfig
from tests.support.tiny_models import near
from tests.support.wrong_server import FAULTS, WrongServer, audit_base, decode

LENGTH, BATCH = 24, 12
SAMPLED = Settings(max_tokens=LENGTH)
GREEDY = Settings(max_tokens=LENGTH, temperature=0.0)
NUCLEUS = Settings(max_tokens=LENGTH, top_p=0.8)
PENALTY = Settings(max_tokens=LENGTH, temperature=0.0, repetition_penalty=1.3)
ENDS = Settings(max_tokens=LENGTH, eos=frozenset({5, 6}))
# Strengths whose promise is a few hundred to a few thousand tokens.
CASES = {
    "residual": (SAMPLED, (0.6, 1.0)), "q-for-p": (SAMPLED, (0.3, 1.0)), "temperature": (SAMPLED, (0.7, 1.3)),
    "late-top-p": (NUCLEUS, (0.2, 1.0)), "stale-keys": (SAMPLED, (0.4, 1.0)), "positions": (SAMPLED, (0.3, 1.0)),
    "after-rejection": (SAMPLED, (0.6, 1.0)),
    "eos": (ENDS, (0.3, 1.0)), "longer": (SAMPLED, (0.1, 1.0)), "shorter": (SAMPLED, (0.1, 1.0)),
    "repeat": (SAMPLED, (0.1, 0.3)), "penalties": (PENALTY, (0.3, 1.0)), "ties": (GREEDY, (0.05, 0.5)),
    "some-greedy": (SAMPLED, (0.12, 0.3)), "mixed-rows": (SAMPLED, (0.15, 0.5)),
}  # fmt: skip
# The same fault in other penalties: of tokens in the text alone, or in the prompt too.
COUNTED = (
    Settings(max_tokens=LENGTH, temperature=0.0, frequency_penalty=1.2),
    Settings(max_tokens=LENGTH, temperature=0.0, presence_penalty=1.5, count_prompt=True),
)
# What is beside the distribution of each token: asked for, and what is said of it.
STOPS = Settings(max_tokens=LENGTH, stop=("n", "hi"))
BESIDE = {
    "stop": (STOPS, "tokens after the stop string"), "overrun": (STOPS, "1 tokens after the stop string"),
    "logprobs": (Settings(max_tokens=LENGTH, logprobs=True), "where the base has"),
}  # fmt: skip
# Which tokens it writes too often depends on the drafts, so that no bet is quite like it.
SLOWER = {"residual": 2.5}
GRID = [(settings, fault, strength) for fault, (settings, strengths) in CASES.items() for strength in strengths]
GRID += [(settings, "penalties", 1.0) for settings in COUNTED]


@pytest.fixture(scope="module")
def base():
    return audit_base()


def prompts(count, seed=0):
    return torch.randint(7, 24, (count, 6), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_fault_is_tried():
    assert {*CASES, *BESIDE} == set(FAULTS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("settings", "fault", "strength"), GRID, ids=str)
def test_a_fault_is_found_within_the_tokens_that_its_power_promises(base, settings, fault, strength):
    """A right server would be found with a chance of 1e-3. A fault whose texts end wrongly is found by the end alone,
    within ln 20 / strength texts in 95 of 100 audits."""
    server = WrongServer(base, fault, strength, seed=1)
    config = AuditConfig(max_tokens=6000, batch=BATCH, tv=0.02, miss_rate=0.0005)
    (result,) = audit(Scorer(base), server, prompts(250 if settings.greedy else 60), [settings], config).results
    assert result.verdict is Verdict.NOT_LOSSLESS and result.chance <= 1e-3 and result.evidence
    tv = sum(server.distances) / len(server.distances)
    if fault in ("longer", "shorter"):
        assert result.texts <= math.log(20) / strength + BATCH
    elif tv > 0.001:
        promise = SLOWER.get(fault, 1) * tokens_to_find(tv, config.alpha, len(BET_NAMES))
        assert result.tokens <= promise + BATCH * LENGTH


def test_a_fault_of_one_place_is_found_sooner_and_named_if_the_server_says_the_places(base):
    """Of tokens that are the first after a rejection, 40 % are greedy. A right server that says them passes, and its
    tokens there, which are a fixed share of all, are no more extreme than z = 4 (1 in 16,000)."""
    config, found = AuditConfig(max_tokens=4000, batch=4, tv=0.02), []
    for says in (False, True):
        server = WrongServer(base, "after-rejection", 0.4, seed=2, says=says)
        found += audit(Scorer(base), server, prompts(60), [SAMPLED], config).results
    silent, said = found
    assert silent.verdict is said.verdict is Verdict.NOT_LOSSLESS and said.tokens < silent.tokens
    assert f"where a token is {Place.AFTER_REJECTION}: the likeliest" in said.evidence[-1], said
    assert said.by_place[Place.AFTER_REJECTION]["z"] > 3 and not silent.by_place
    for settings in (SAMPLED, GREEDY):
        config = AuditConfig(max_tokens=3600, batch=24, tv=0.12)
        server = WrongServer(base, seed=4, says=True)
        (right,) = audit(Scorer(base), server, prompts(150), [settings], config).results
        place = right.by_place[Place.AFTER_REJECTION]
        assert right.verdict is Verdict.LOSSLESS and 0.02 < place["tokens"] / right.tokens < 0.95, place
        assert abs(place["z"]) < 4 if settings is SAMPLED else place["misses"] == 0


def test_places_are_known_before_their_tokens():
    """A pass over the prompt, a draft of 2 rejected at its first, one accepted whole, one cut short, and its next."""
    rejected, whole = Place.AFTER_REJECTION, Place.AFTER_DRAFT
    assert places_of([1, 1, 3, 2, 1], [0, 2, 2, 2, 2]) == (None, None, rejected, None, whole, None, None, rejected)
    assert places_of([1, 3, 1], [0, 6, 6]) == (None, None, None, None, rejected)  # a tree


@pytest.mark.parametrize(
    "settings",
    [
        SAMPLED,
        GREEDY,
        ENDS,
        *COUNTED,
        Settings(0.8, top_k=12, top_p=0.8, min_p=0.02, repetition_penalty=1.3, max_tokens=LENGTH),
    ],
    ids=str,
)
def test_a_right_speculative_server_is_lossless(base, settings):
    config = AuditConfig(max_tokens=3600, batch=24, tv=0.12)
    report = audit(Scorer(base), WrongServer(base, seed=3), prompts(150), [settings], config)
    assert report.verdict is Verdict.LOSSLESS and report.exit_code == 0, str(report)


class Letters:
    """The tokenizer of the wrong server."""

    bos_token_id = chat_template = None
    decode = staticmethod(decode)


@pytest.mark.parametrize("strength", [0.1, 1.0])
@pytest.mark.parametrize("fault", BESIDE)
def test_stop_strings_and_log_probabilities_are_judged_too(base, fault, strength):
    """The tokens of these servers are right. The right one passes; each fault is found, in words, and wrong
    log-probabilities leave the text lossless."""
    settings, words = BESIDE[fault]
    config = AuditConfig(max_tokens=4000, batch=24, tv=0.12)
    right = audit(Scorer(base), WrongServer(base, seed=3), prompts(60), [settings], config, tokenizer=Letters())
    assert right.verdict is Verdict.LOSSLESS, str(right)
    server = WrongServer(base, fault, strength, seed=3)
    found = audit(Scorer(base), server, prompts(60), [settings], config, tokenizer=Letters())
    assert found.verdict is Verdict.NOT_LOSSLESS and words in str(found), str(found)
    assert [str(result.verdict) for result in found.results][: settings.logprobs] in ([], ["lossless"])


def test_our_generate_and_transformers_are_lossless_by_any_drafter(base):
    """Both are asked greedily and sampled; the chance of a false alarm is 1e-3 for each report."""
    from specheads import DraftModel
    from specheads.decoding.generation.generate import generate

    class Ours:
        device = base.device

        def generate(self, ids, **options):
            return generate(base, ids, draft=DraftModel(near(base, 0.1)), **options)

    torch.manual_seed(0)
    config = AuditConfig(max_tokens=1600, batch=20, tv=0.12)
    for model in (base, Ours()):
        report = audit(Scorer(base), InProcess(model), prompts(60), [GREEDY, SAMPLED], config)
        assert report.verdict is Verdict.LOSSLESS, str(report)


def test_a_lossy_rule_of_ours_is_found(base):
    """The report tells it in words and as JSON, and its exit code is 3."""
    from specheads import DraftModel
    from specheads.decoding.generation.generate import generate

    class Lossy:
        device = base.device

        def generate(self, ids, **options):
            return generate(base, ids, draft=DraftModel(near(base, 0.1)), accept="typical", **options)

    torch.manual_seed(0)
    client = InProcess(Lossy(), "typical acceptance")
    report = audit(Scorer(base), client, prompts(60), [SAMPLED], AuditConfig(max_tokens=4000, batch=20))
    assert report.exit_code == 3 and "typical acceptance: not lossless" in str(report)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == "not lossless"


def test_another_dtype_of_the_server_is_within_rounding_at_most(base):
    """A bfloat16 server's greedy text, against the float32 base: misses are within the margin that was measured."""
    served = audit_base().bfloat16()
    config = AuditConfig(max_tokens=1600, batch=20)
    scorer = Scorer(base, torch.bfloat16)
    report = audit(scorer, InProcess(served), prompts(60), [GREEDY], config)
    assert report.verdict in (Verdict.LOSSLESS, Verdict.WITHIN_ROUNDING), str(report)


def test_what_is_no_text_of_the_base_is_refused_in_one_line(base):
    with pytest.raises(ValueError, match="the base has 24"):
        Scorer(base).score([1], [99], SAMPLED)
    with pytest.raises(ValueError, match="seed"):
        InProcess(base, seed=1)
    with pytest.raises(ValueError, match="at least one"):
        audit(Scorer(base), InProcess(base), [], [SAMPLED])
