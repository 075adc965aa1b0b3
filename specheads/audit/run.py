"""An audit: asks a server batch by batch, and stops each way to ask as soon as its verdict is certain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from specheads.audit.clients.client import Client
from specheads.audit.diagnosis import Diagnosis, Mistake, diagnose
from specheads.audit.scoring import ForeignToken, Scorer
from specheads.audit.settings import Settings
from specheads.audit.verdict import AuditReport, Result, Verdict
from specheads.audit.watch import AuditConfig, GreedyWatch, SampledWatch, Watch
from specheads.terminal import Report


def audit(
    scorer: Scorer, client: Client, prompts: Sequence[list[int]], settings: Sequence[Settings],
    config: AuditConfig | None = None, report: Report | None = None, tokenizer: Any = None,
) -> AuditReport:  # fmt: skip
    """Ask for each setting until its verdict is certain, or `max_tokens` of the config are used.

    prompts: as ids; sampled text asks them again and again in turn, greedy text once each, since an answer that is
    repeated shows nothing. The chance of a false alarm is divided equally among the settings. tokenizer: the base's,
    by which more mistakes of the set-up are recognised.
    """
    if not prompts or not settings:
        raise ValueError(f"{len(prompts)} prompts and {len(settings)} settings: an audit needs at least one of each")
    config = config or AuditConfig()
    results: list[Result] = []
    for way in settings:

        def show(share: float, words: str, done: int = len(results)) -> None:
            if report:
                report((done + share) / len(settings), words)

        results += _audit_one(scorer, client, prompts, way, config, config.alpha / len(settings), show, tokenizer)
        if any(result.mistake for result in results):  # the same in every way to ask
            break
    return AuditReport(client.name, config.alpha, tuple(results))


def _audit_one(
    scorer: Scorer, client: Client, prompts: Sequence[list[int]], settings: Settings, config: AuditConfig,
    alpha: float, report: Report, tokenizer: Any,
) -> list[Result]:  # fmt: skip
    """The result of the text, and of the log-probabilities if they are asked for."""
    decode = None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True)
    watch = make_watch(settings, config, alpha)
    asked, answers = [], []
    share = 0.0
    for batch in _batches(prompts, settings, config):
        report(share, f"{settings}: {watch.tokens:,} tokens, {len(batch)} texts more asked for")
        asked += batch
        answers += client.ask(batch, settings)
        try:
            for prompt, answer in zip(batch, answers[-len(batch) :], strict=True):
                if answer.tokens or not answer.text:
                    watch.add(scorer, prompt, answer, decode)
        except ForeignToken as error:
            return [watch.result().explained(Diagnosis(Mistake.TOKENIZER, str(error)))]
        if (result := watch.result()).verdict is not Verdict.UNDECIDED:
            break
        share = watch.tokens / (watch.tokens + (result.more_tokens or config.max_tokens))
    if result.verdict is Verdict.NOT_LOSSLESS:
        report(1.0, f"{settings}: looking for the cause")
        result = result.explained(diagnose(client, scorer, asked, answers, settings, tokenizer))
    return [result] if watch.logprobs is None or result.mistake else [result, watch.logprobs.result()]


def make_watch(settings: Settings, config: AuditConfig, alpha: float) -> Watch:
    return GreedyWatch(settings, config, alpha) if settings.greedy else SampledWatch(settings, config, alpha)


def _batches(prompts: Sequence[list[int]], settings: Settings, config: AuditConfig) -> list[list[list[int]]]:
    """The requests, known beforehand: at most `max_tokens` tokens, in batches."""
    count = max(1, config.max_tokens // settings.max_tokens)
    chosen = list(prompts[:count]) if settings.greedy else list(islice(cycle(prompts), count))
    return [chosen[start : start + config.batch] for start in range(0, len(chosen), config.batch)]
