"""What is known of a server so far: a watch takes its texts, and gives its verdict at any time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import torch

from specheads.audit.bets import BET_NAMES, EarlierAnswers, bet
from specheads.audit.checks import (
    Decode,
    end_fault,
    greedy_gaps,
    impossible,
    likelihood,
    likelihood_z,
    random_ranks,
    stop_fault,
    uniform_distance,
)
from specheads.audit.clients.client import Answer, Place
from specheads.audit.evidence import Evidence, smallest_rate, smallest_tv, tokens_to_find, tokens_to_miss
from specheads.audit.logprobs import LogprobWatch
from specheads.audit.scoring import ScoredText, Scorer
from specheads.audit.settings import Settings
from specheads.audit.verdict import Result, Verdict
from specheads.options import OptionError

MAX_LINES = 5  # of evidence of a kind
Places = tuple[Place | None, ...]


@dataclass(frozen=True)
class AuditConfig:
    """alpha: the chance of a false alarm of the whole audit; tv: the total variation a token of sampled text, and
    miss_rate: the share of wrong greedy tokens, that "lossless" rules out; max_tokens: asked for in each setting;
    batch: prompts asked for together."""

    alpha: float = 1e-3
    tv: float = 0.05
    miss_rate: float = 0.005
    max_tokens: int = 20_000
    batch: int = 8

    def __post_init__(self) -> None:
        for name in ("alpha", "tv", "miss_rate"):
            if not 0 < getattr(self, name) < 1:
                raise OptionError(f"{{{name}}}: expected a share between 0 and 1", **{name: getattr(self, name)})
        for name in ("max_tokens", "batch"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise OptionError(f"{{{name}}}: expected a whole number of at least 1", **{name: getattr(self, name)})


class Watch(ABC):
    """Of one way to ask. alpha: this one's part of the chance of a false alarm."""

    def __init__(self, settings: Settings, config: AuditConfig, alpha: float) -> None:
        self.settings, self.config, self.alpha = settings, config, alpha
        self.texts = self.tokens = 0
        self.faults: list[str] = []  # what a right server never does
        self.roundings: list[str] = []  # what it does by rounding alone
        self.logprobs = LogprobWatch(settings, config.miss_rate, MAX_LINES) if settings.logprobs else None

    def add(self, scorer: Scorer, prompt: list[int], answer: Answer, decode: Decode | None = None) -> None:
        """One text. decode: the base's, of ids to text, without which stop strings are not judged."""
        self.texts += 1
        tokens = answer.tokens
        fault = end_fault(tokens, self.settings)
        if fault is None and self.settings.stop and decode is not None:
            fault = stop_fault(tokens, self.settings, decode, answer.text)
        if fault is not None:
            self.faults.append(f"text {self.texts}, token {fault.index + 1}: {fault.words}")
            tokens = tokens[: fault.index]
        if tokens:
            text = scorer.score(prompt, tokens, self.settings)
            self.score(text, None if answer.places is None else answer.places[: len(tokens)])
            if self.logprobs is not None:
                self.logprobs.add(text, answer.logprobs)

    @abstractmethod
    def score(self, text: ScoredText, places: Places | None = None) -> None:
        """places: of each token, if the server says them."""

    @abstractmethod
    def result(self) -> Result: ...

    def _write(self, i: int, text: ScoredText, words: str, places: Places | None) -> str:
        place = f" ({places[i]})" if places and places[i] else ""
        return f"text {self.texts}, token {i + 1}: {int(text.tokens[i])} {words}{place}"


class GreedyWatch(Watch):
    """Each token must be the argmax, given the server's own prefix, or within what rounding explains."""

    def __init__(self, settings: Settings, config: AuditConfig, alpha: float) -> None:
        super().__init__(settings, config, alpha)
        self.answers: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.largest_gap = self.margin = 0.0
        self.by_place: dict[Place, Counter[str]] = {}

    def score(self, text: ScoredText, places: Places | None = None) -> None:
        key = (text.prompt, tuple(text.tokens.tolist()))
        if key in self.answers:  # the same answer again shows nothing new
            return
        self.answers.add(key)
        self.tokens += len(text.tokens)
        gaps = greedy_gaps(text.scores, text.tokens)
        self.largest_gap, self.margin = max(self.largest_gap, float(gaps.max())), max(self.margin, text.margin)
        for place, gap in zip(places or (), gaps.tolist(), strict=False):
            if place is not None:
                self.by_place.setdefault(place, Counter()).update(tokens=1, misses=int(gap > 0))
        for i in gaps.nonzero().flatten().tolist():
            gap, likeliest = float(gaps[i]), int(text.scores[i].argmax())
            words = self._write(i, text, f"where the likeliest is {likeliest}, {gap:.3g} above", places)
            (self.roundings if gap <= text.margin else self.faults).append(words)

    def result(self) -> Result:
        more = max(0, tokens_to_miss(self.config.miss_rate) - self.tokens)
        if self.faults:
            verdict, more = Verdict.NOT_LOSSLESS, 0
        elif more:
            verdict = Verdict.UNDECIDED
        else:
            verdict = Verdict.WITHIN_ROUNDING if self.roundings else Verdict.LOSSLESS
        figures = {
            "misses": len(self.roundings) + len(self.faults),
            "largest_gap": self.largest_gap,
            "margin": self.margin,
        }
        return Result(
            str(self.settings), verdict, self.texts, self.tokens, 0.0 if self.faults else 1.0,
            smallest_rate(self.tokens), more, tuple((self.faults or self.roundings)[:MAX_LINES]), figures,
            by_place={str(place): dict(counts) for place, counts in sorted(self.by_place.items())},
        )  # fmt: skip


class SampledWatch(Watch):
    """Bets on every token, for p exactly and for all that rounding makes of p. If the server says the tokens' places,
    as many bets again on those of each place: all share one chance of a false alarm."""

    def __init__(self, settings: Settings, config: AuditConfig, alpha: float, seed: int = 0) -> None:
        super().__init__(settings, config, alpha)
        self.groups: Places = (None,)  # of which tokens: all, those of a place
        self.exact = self.robust = Evidence.empty(len(BET_NAMES))
        self.earlier, self.generator = EarlierAnswers(), torch.Generator().manual_seed(seed)
        self.log_probs: list[torch.Tensor] = []  # of each text: log p(x), mean, variance (3, n)
        self.ranks: list[torch.Tensor] = []
        self.places: list[Place | None] = []
        self.shift_sum = 0.0

    def score(self, text: ScoredText, places: Places | None = None) -> None:
        if not self.tokens:
            self.groups = (None,) if places is None else (None, *Place)
            self.exact, self.robust = (Evidence.empty(len(BET_NAMES) * len(self.groups)) for _ in range(2))
        self.tokens += len(text.tokens)
        self.shift_sum += float(text.shift.sum())
        cut = impossible(text.scores, text.uncut, text.tokens, text.margin, top_p=self.settings.top_p < 1)
        for i in cut.nonzero().flatten().tolist():
            self.faults.append(self._write(i, text, f"which {self.settings} rules out", places))
        uniforms = torch.rand(len(text.tokens), generator=self.generator, dtype=torch.float64).to(text.tokens.device)
        places = places or (None,) * len(text.tokens)
        self.places += places
        for evidence, factors in zip((self.exact, self.robust), bet(text, uniforms, self.earlier), strict=True):
            evidence.add(self._split(factors, places))
        self.ranks.append(random_ranks(text.scores, text.tokens, uniforms).cpu())
        self.log_probs.append(torch.stack(likelihood(text.scores, text.tokens)).cpu())

    def _split(self, factors: torch.Tensor, places: Places) -> torch.Tensor:
        """Log factors (n, K) for each group in turn, (n, groups * K): 0 at tokens of other places."""
        masks = torch.tensor([[group is None or place is group for group in self.groups] for place in places])
        return (masks.to(factors.device).unsqueeze(-1) * factors.unsqueeze(1)).flatten(1)

    def result(self) -> Result:
        bets, limit = len(BET_NAMES) * len(self.groups), -math.log(self.alpha)
        shift = self.shift_sum / max(1, self.tokens)
        room = self.config.tv - 2 * shift  # what rounding hides is not found
        more = max(0, tokens_to_find(room, self.alpha, bets) - self.tokens) if room > 0 else None
        evidence, chance = list(self.faults[:MAX_LINES]), 0.0 if self.faults else self.robust.chance
        alarm = self.robust.peak >= limit
        if alarm:
            group, name = divmod(self.robust.best(), len(BET_NAMES))
            where = f", where a token is {self.groups[group]}" if group else ""
            evidence.append(f"most like this{where}: {BET_NAMES[name]}")
        if alarm or self.faults:
            verdict, more = Verdict.NOT_LOSSLESS, 0
        elif more != 0:
            verdict = Verdict.UNDECIDED
            if more is None:
                evidence.append(f"rounding alone moves {shift:.1%} of the tokens: score in the server's dtype")
        else:
            verdict = Verdict.WITHIN_ROUNDING if self.exact.peak >= limit else Verdict.LOSSLESS
        power = min(1.0, smallest_tv(self.tokens, self.alpha, bets) + 2 * shift)
        return Result(
            str(self.settings), verdict, self.texts, self.tokens, chance, power, more, tuple(evidence),
            self._figures(), by_place=self._by_place(),
        )  # fmt: skip

    def _figures(self) -> dict[str, float]:
        """z of the log-likelihood and the distance of the ranks to uniform, with its 1 in 1,000 bound."""
        if not self.tokens:
            return {}
        figures = {"rank_distance": uniform_distance(torch.cat(self.ranks)), "rank_bound": 1.95 / self.tokens**0.5}
        return {"z": _z(torch.cat(self.log_probs, -1)), **figures, "log_evidence": self.robust.peak}

    def _by_place(self) -> dict[str, dict[str, float]]:
        """Of each: its tokens, their z, and the log of what their own bets won so far, were they the only ones."""
        figures = {}
        wealth = self.robust.log_wealth.view(len(self.groups), -1).logsumexp(-1) + math.log(len(self.groups))
        for place, won in zip(self.groups[1:], wealth[1:].tolist(), strict=True):
            chosen = torch.tensor([other is place for other in self.places])
            figures[str(place)] = {
                "tokens": int(chosen.sum()), "z": _z(torch.cat(self.log_probs, -1)[:, chosen]), "log_evidence": won
            }  # fmt: skip
        return figures


def _z(log_probs: torch.Tensor) -> float:
    """likelihood_z of log p(x), mean and variance (3, n), without what is a fault, or the edge of a cut."""
    logp, mean, variance = log_probs
    possible = logp.isfinite()
    return likelihood_z(logp[possible], mean[possible], variance[possible])
