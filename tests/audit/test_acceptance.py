"""Claims about a server's accepted drafts beside those here, and the page: a difference is said with its causes."""

import pytest
import torch

from specheads import chain
from specheads.audit.acceptance import CAUSES, Comparison, compare, decode_here
from specheads.audit.clients.client import Answer
from specheads.audit.clients.http import OpenAIClient
from specheads.audit.page import markdown
from specheads.audit.settings import Settings
from specheads.audit.verdict import AuditReport, Result, Verdict
from specheads.decoding.results import AcceptanceCounts
from specheads.training.parity import ParityConfig
from specheads.training.parity import compare as parity_of
from tests.support.learnt_heads import PROMPTS, learnt
from tests.support.openai_server import serving

GREEDY, DEPTH = Settings(0.0, max_tokens=20), 3


class Server:
    """This library as a server: it counts passes as vLLM does, or says of each answer what was accepted."""

    name = "ours"

    def __init__(self, model, counts):
        self.model, self.counts = model, counts
        self.steps, self.tokens, self.by_depth = 5, 5 + 4 * DEPTH, [4] * DEPTH  # of earlier requests

    def ask(self, prompts, settings):
        return [self.answer(prompt, settings) for prompt in prompts]

    def answer(self, prompt, settings):
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=settings.max_tokens, do_sample=False, tree=chain(DEPTH),
            return_dict_in_generate=True,
        )  # fmt: skip
        tokens, steps = out.sequences[0, len(prompt) :].tolist(), out.steps[1:]
        self.steps += len(steps)
        self.tokens += len(tokens) - 1
        for step in steps:
            for i in range(step.accepted[0]):
                self.by_depth[i] += 1
        if self.counts:
            return Answer(tokens)
        return Answer(tokens, drafted=DEPTH * len(steps), accepted=len(tokens) - 1 - len(steps))

    def counters(self):
        return AcceptanceCounts(self.steps, self.tokens, tuple(self.by_depth)) if self.counts else None


@pytest.mark.parametrize("counts", [True, False])
def test_a_server_with_the_same_head_accepts_the_same(counts):
    model = learnt("eagle3")
    found = compare(Server(model, counts), model, PROMPTS, GREEDY)
    assert found.server.steps == found.ours.steps and found.server.tokens_per_step > 1.2
    assert found.errors == pytest.approx(0, abs=0.3) and found.equal and len(found.ours.by_depth) == DEPTH
    assert not counts or found.server.by_depth == found.ours.by_depth


@pytest.mark.parametrize("end", [(), (96,)])
def test_the_figure_here_is_that_of_the_parity_gate(end):
    """Also where a text ends with a draft, and beside a base whose generation config has a penalty."""
    model = learnt("medusa")
    model.generation_config.eos_token_id = [*end] or None
    config = ParityConfig(max_new_tokens=30)
    if end:  # the token that is drafted in the middle of a step
        out = model.generate(
            torch.tensor(PROMPTS[:1]), do_sample=False, max_new_tokens=30, return_dict_in_generate=True
        )
        step = next(step for step in out.steps[1:] if step.accepted[0] > 1)
        model.generation_config.eos_token_id = end = [step.tokens[0][0]]
    parity = parity_of(model, [{"input_ids": prompt} for prompt in PROMPTS], config)
    model.generation_config.repetition_penalty = 1.5
    found = decode_here(model, PROMPTS, Settings(0.0, max_tokens=30, eos=frozenset(end)), model.head.scored_depths)
    assert (found.tokens_per_step, found.steps) == (parity.measured, parity.steps)
    assert not end or found.tokens < found.steps + sum(found.by_depth)  # a step without a token of the base


def test_what_is_more_than_two_standard_errors_apart_is_said_with_its_causes():
    """Depth 1, accepted with probability 0.8 here: the error of 400 and 400 steps is sqrt(0.16 / 200) = 0.0283."""
    ours = AcceptanceCounts(400, 720, (320,))
    apart, near = (Comparison(AcceptanceCounts(400, tokens), ours) for tokens in (680, 700))
    assert apart.errors == pytest.approx(-0.1 / 0.02828, rel=1e-3) and not apart.equal
    assert all(cause in str(apart) for cause in CAUSES)
    assert near.equal and "same within 2" in str(near) and near.to_dict()["equal"]


def test_vllms_counters_are_summed_over_its_engines():
    page = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{e}",model_name="m"{position}}} {value}.0\n'
        f'vllm:spec_decode_num_{name}_created{{engine="{e}",model_name="m"{position}}} 1.7e+09\n'
        for e in (0, 1)
        for name, position, value in (
            ("drafts", "", 10), ("accepted_tokens", "", 12), ("draft_tokens", "", 20),
            ("accepted_tokens_per_pos", ',position="0"', 8), ("accepted_tokens_per_pos", ',position="1"', 4),
        )
    )  # fmt: skip
    with serving(lambda route, body, headers: (200, ""), page) as url:
        assert OpenAIClient(url, "m").counters() == AcceptanceCounts(20, 44, (16, 8))
    with serving(lambda route, body, headers: (200, "")) as url:
        assert OpenAIClient(url, "m").counters() is None


def test_what_differs_at_later_output_positions_alone_is_said_there(monkeypatch):
    """A server whose drafts fail from its 13th token on, at two ranges of 12. Ours of each range is the difference of
    two whole decodings, and of the first range one of them."""
    monkeypatch.setattr("specheads.audit.acceptance.POSITIONS", (0, 12, 1024))
    model, settings = learnt("eagle3"), Settings(0.0, max_tokens=24)
    here = [decode_here(model, PROMPTS, Settings(0.0, max_tokens=n), DEPTH) for n in (12, 24)]

    class Late(Server):
        def answer(self, prompt, settings):
            answer = super().answer(prompt, settings)
            if len(answer.tokens) <= 12:
                return answer
            accepted = super().answer(prompt, first).accepted
            steps = len(answer.tokens) - 1 - accepted
            return Answer(answer.tokens, drafted=DEPTH * steps, accepted=accepted)

    first = Settings(0.0, max_tokens=12)
    right, late = (compare(server(model, False), model, PROMPTS, settings) for server in (Server, Late))
    for found in (right, late):
        assert [*found.by_position] == [0, 12]
        assert found.by_position[0].ours == here[0] and found.by_position[12].ours == here[1] - here[0]
        assert found.by_position[0].equal and found.ours == here[1]
    assert right.equal and all(part.server.steps == part.ours.steps for part in right.by_position.values())
    assert late.by_position[12].server.tokens_per_step == 1 and not late.equal
    assert "from output position 12" in str(late) and "from output position 0;" not in late.words()[0]
    assert late.to_dict()["by_position"]["12"]["equal"] is False


def test_sampled_text_and_silent_servers_are_not_compared():
    with pytest.raises(ValueError, match="greedy"):
        compare(None, None, [], Settings(1.0))

    class Silent(Server):
        def ask(self, prompts, settings):
            return [Answer([1, 2]) for _ in prompts]

        def counters(self):
            return None

    assert compare(Silent(None, False), None, [[1]], GREEDY) is None


def test_the_page_of_evidence_has_each_verdict_its_figures_and_the_comparison():
    results = (
        Result("greedy", Verdict.LOSSLESS, 16, 1024, 1.0, 0.003, 0, (), {"misses": 0.0}),
        Result("temperature 1", Verdict.NOT_LOSSLESS, 8, 449, 1e-6, 0.1, 0, ("most like this: hot",), {"z": -7.0}),
    )
    sides = AcceptanceCounts(225, 505, (180, 100)), AcceptanceCounts(225, 577, (202, 150))
    apart = Comparison(*sides, {64: Comparison(*sides)})
    page = markdown(AuditReport("http://host", 1e-3, results), "org/model", apart)
    for line in (
        "**not lossless**", "| greedy | lossless | 16 | 1,024 |  | 0.3% of the tokens |", "- most like this: hot",
        "| temperature 1 | not lossless | 8 | 449 | 1e-06 |  |", "| z of the log-likelihood | -7 |",
        "| server | 225 | 2.244 | 0.800 | 0.444 |", "| here | 225 | 2.564 | 0.898 | 0.667 |", CAUSES[0],
        "| 64 | 2.244 | 2.564 |",
    ):  # fmt: skip
        assert line in page
    mistaken = AuditReport("http://host", 1e-3, (results[1].explained("another base, not drafting: see"),))
    assert "This is another base" in markdown(mistaken, "org/model") and mistaken.exit_code == 4
