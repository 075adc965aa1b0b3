"""An audit: asks a server batch by batch, and stops each way to ask as soon as its verdict is certain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from specheads.audit.clients.client import Client
from specheads.audit.scoring import Scorer
from specheads.audit.settings import Settings
from specheads.audit.verdict import AuditReport, Verdict
from specheads.audit.watch import AuditConfig, GreedyWatch, SampledWatch, Watch
from specheads.terminal import Report


def audit(
    scorer: Scorer, client: Client, prompts: Sequence[list[int]], settings: Sequence[Settings],
    config: AuditConfig | None = None, report: Report | None = None,
) -> AuditReport:  # fmt: skip
    """Ask for each setting until its verdict is certain, or `max_tokens` of the config are used.

    prompts: as ids; sampled text asks them again and again in turn, greedy text once each, since an answer that is
    repeated shows nothing. The chance of a false alarm is divided equally among the settings.
    """
    if not prompts or not settings:
        raise ValueError(f"{len(prompts)} prompts and {len(settings)} settings: an audit needs at least one of each")
    config = config or AuditConfig()
    results = []
    for done, way in enumerate(settings):
        watch = make_watch(way, config, config.alpha / len(settings))
        for batch in _batches(prompts, way, config):
            for prompt, tokens in zip(batch, client.ask(batch, way), strict=True):
                watch.add(scorer, prompt, tokens)
            if (result := watch.result()).verdict is not Verdict.UNDECIDED:
                break
            if report:
                share = watch.tokens / (watch.tokens + (result.more_tokens or config.max_tokens))
                report((done + share) / len(settings), f"{way}: {watch.tokens:,} tokens")
        results.append(watch.result())
    return AuditReport(client.name, config.alpha, tuple(results))


def make_watch(settings: Settings, config: AuditConfig, alpha: float) -> Watch:
    return GreedyWatch(settings, config, alpha) if settings.greedy else SampledWatch(settings, config, alpha)


def _batches(prompts: Sequence[list[int]], settings: Settings, config: AuditConfig) -> list[list[list[int]]]:
    """The requests, known beforehand: at most `max_tokens` tokens, in batches."""
    count = max(1, config.max_tokens // settings.max_tokens)
    chosen = list(prompts[:count]) if settings.greedy else list(islice(cycle(prompts), count))
    return [chosen[start : start + config.batch] for start in range(0, len(chosen), config.batch)]
