"""Claims about the chance of a false alarm and power, over simulated audits of servers whose model is a table."""

import math

import pytest
import torch

from specheads.audit.bets import BET_NAMES
from specheads.audit.clients.client import Answer, Place
from specheads.audit.evidence import Evidence, smallest_rate, smallest_tv, tokens_to_find, tokens_to_miss
from specheads.audit.scoring import ScoredText
from specheads.audit.settings import Settings, process
from specheads.audit.verdict import Verdict
from specheads.audit.watch import AuditConfig, GreedyWatch, SampledWatch

V, TEXTS, LENGTH = 10, 6, 40
WAYS = (
    Settings(max_tokens=LENGTH),
    Settings(max_tokens=LENGTH, temperature=0.7, top_p=0.9, eos=frozenset({3})),
    Settings(max_tokens=LENGTH, temperature=1.5, top_k=5, min_p=0.05),
)
TABLE = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))


class TableScorer:
    """Scores by the table, as if rounding could shift each distribution by `shift`."""

    def __init__(self, table, shift=0.0):
        self.table, self.shift = table, shift

    def score(self, prompt, tokens, settings):
        previous = torch.tensor([prompt[-1], *tokens[:-1]])
        raw = self.table[previous]
        uncut = raw / settings.temperature if not settings.greedy else raw
        shift = torch.full((len(tokens),), self.shift)
        scores = process(raw, prompt, tokens, settings)
        return ScoredText(tuple(prompt), torch.tensor(tokens), previous, raw, uncut, scores, 2 * self.shift, shift)


def write_texts(table, settings, count, generator, length=LENGTH):
    """`count` texts of a server whose model is the table, after token 0 or 1 in turn: prompts that are asked often."""
    p = process(table, [0], [0] * V, settings).softmax(-1)
    columns = [torch.arange(count) % 2]
    for _ in range(length):
        columns.append(torch.multinomial(p[columns[-1]], 1, generator=generator).squeeze(-1))
    for prompt, *tokens in torch.stack(columns, 1).tolist():
        end = next((i for i, token in enumerate(tokens) if token in settings.eos), length)
        yield [prompt], tokens[: end + 1]


def audit_table(table, seed, settings=WAYS[0], texts=TEXTS, scorer=None, **options):
    config = AuditConfig(**options)
    watch = SampledWatch(settings, config, config.alpha, seed)
    for prompt, tokens in write_texts(table, settings, texts, torch.Generator().manual_seed(seed)):
        places = None
        if seed % 2:  # a server that says them; here they depend on the token before
            before = [*prompt, *tokens][:-1]
            places = tuple((Place.AFTER_REJECTION, Place.AFTER_DRAFT, None)[token % 3] for token in before)
        watch.add(scorer or TableScorer(TABLE), prompt, Answer(tokens, places=places))
    return watch


@pytest.mark.parametrize("audits", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_right_server_is_accused_no_more_often_than_stated(audits):
    """Looked at after every token, half of them with bets on places. More alarms than three standard deviations above
    the bound: below 1 in 200."""
    watches = [audit_table(TABLE, seed, WAYS[seed % len(WAYS)]) for seed in range(audits)]
    assert not any(watch.faults for watch in watches)
    for alpha in (1e-3, 0.05, 0.3):
        alarms = sum(watch.robust.peak >= -math.log(alpha) for watch in watches)
        assert alarms <= audits * alpha + 3 * math.sqrt(audits * alpha * (1 - alpha)), (alpha, alarms)


def test_a_wrong_table_is_found_within_what_its_power_promises():
    """20 audits, half with bets on places; the promise is 95 %, so that fewer than 16 of 20 has a chance below 1 in
    300."""
    hot = TABLE / 1.3
    tv = float((hot.softmax(-1) - TABLE.softmax(-1)).abs().sum(-1).mean()) / 2
    texts = tokens_to_find(tv, 1e-3, len(BET_NAMES)) // LENGTH
    results = [audit_table(hot, seed, texts=texts).result() for seed in range(20)]
    assert sum(result.verdict is Verdict.NOT_LOSSLESS for result in results) >= 16


def test_a_shift_that_rounding_explains_is_no_loss_and_is_said():
    """The server's table is another one throughout, by less than the shift that was measured."""
    other = TABLE / 1.2
    shift = float((other.softmax(-1) - TABLE.softmax(-1)).abs().sum(-1).max()) / 2
    options = {"texts": 100, "tv": 0.5}
    exact = audit_table(other, 0, **options).result()
    robust = audit_table(other, 0, scorer=TableScorer(TABLE, shift), **options).result()
    assert exact.verdict is Verdict.NOT_LOSSLESS and robust.verdict is Verdict.WITHIN_ROUNDING
    assert robust.power > exact.power


def test_the_verdict_waits_for_the_tokens_it_needs_and_says_how_many():
    result = audit_table(TABLE, 0).result()
    assert result.verdict is Verdict.UNDECIDED and result.verdict.exit_code == 4
    assert result.tokens + result.more_tokens == tokens_to_find(0.05, 1e-3, len(BET_NAMES))
    assert f"{result.more_tokens:,} more needed" in str(result)


def test_rounding_above_the_goal_cannot_be_decided_by_tokens():
    result = audit_table(TABLE, 0, scorer=TableScorer(TABLE, 0.2)).result()
    assert result.verdict is Verdict.UNDECIDED and result.more_tokens is None
    assert "server's dtype" in str(result)


def test_equal_seeds_are_found_though_each_text_alone_is_right():
    """Every answer to a prompt is the same one."""
    watch = SampledWatch(WAYS[0], AuditConfig(), 1e-3)
    texts = list(write_texts(TABLE, WAYS[0], 2, torch.Generator().manual_seed(0), 8))
    for prompt, tokens in texts * 15:
        watch.score(TableScorer(TABLE).score(prompt, tokens, WAYS[0]))
    result = watch.result()
    assert result.verdict is Verdict.NOT_LOSSLESS and "repeat one another" in result.evidence[-1]


def test_power_and_tokens_are_inverse():
    for tv in (0.01, 0.05, 0.3):
        assert smallest_tv(tokens_to_find(tv, 1e-3, 45), 1e-3, 45) == pytest.approx(tv, rel=0.01)
        assert 0.8 * tv < smallest_rate(tokens_to_miss(tv)) <= tv


def test_evidence_keeps_its_peak():
    """Losing bets after an alarm do not take it back."""
    evidence = Evidence.empty(1)
    evidence.add(torch.tensor([[8.0], [-8.0]]))
    assert evidence.chance == pytest.approx(math.exp(-8)) and evidence.tokens == 2


@pytest.mark.parametrize(
    ("gap", "margin", "verdict"),
    [(0.0, 0.0, Verdict.LOSSLESS), (0.01, 0.02, Verdict.WITHIN_ROUNDING), (0.5, 0.02, Verdict.NOT_LOSSLESS)],
)
def test_greedy_text_misses_the_argmax_by_rounding_alone(gap, margin, verdict):
    settings = Settings(temperature=0.0, max_tokens=V)
    watch = GreedyWatch(settings, AuditConfig(miss_rate=0.3), 1e-3)
    scores = torch.eye(V)
    scores[0, 1] = 1 + gap
    text = ScoredText((0,), torch.arange(V), torch.arange(V), scores, scores, scores, margin, torch.zeros(V))
    for _ in range(2):  # the same answer again counts once
        watch.score(text)
    result = watch.result()
    assert result.verdict is verdict and result.tokens == V and result.figures["misses"] == (gap > 0)
