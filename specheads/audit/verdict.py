"""Verdicts: of one way to ask and of a whole audit, for people and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    LOSSLESS = "lossless"
    WITHIN_ROUNDING = "within rounding"
    UNDECIDED = "undecided"
    NOT_LOSSLESS = "not lossless"

    @property
    def exit_code(self) -> int:
        return {Verdict.NOT_LOSSLESS: 3, Verdict.UNDECIDED: 4}.get(self, 0)


@dataclass(frozen=True)
class Result:
    """Of one way to ask (settings). chance: at most this often does a right server show as much, at any stopping time;
    power: the smallest deviation that these tokens find with probability 95 %, as total variation a token (greedy: the
    share of wrong tokens); more_tokens: that the verdict still needs, None if tokens cannot bring it; evidence: lines
    for people; figures: numbers beside the verdict, each looked at once; by_place: such numbers of the tokens of each
    place among the server's passes, if it says which; mistake: of the set-up, for which the server's text could not be
    compared with the base's."""

    settings: str
    verdict: Verdict
    texts: int
    tokens: int
    chance: float
    power: float
    more_tokens: int | None = 0
    evidence: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    by_place: dict[str, dict[str, float]] = field(default_factory=dict)
    mistake: str | None = None

    def explained(self, diagnosis: object | None) -> Result:
        """The same, undecided because of a mistake of the set-up, if one was found."""
        if diagnosis is None:
            return self
        return replace(self, verdict=Verdict.UNDECIDED, more_tokens=None, mistake=str(diagnosis))

    def __str__(self) -> str:
        head = f"{self.settings}: {self.verdict}, {self.tokens:,} tokens of {self.texts:,} texts"
        if self.mistake:
            head += f"; this is {self.mistake}"
        elif self.verdict is Verdict.NOT_LOSSLESS:
            head += f"; a right server shows as much with a chance of at most {self.chance:.1g}"
        elif self.verdict is Verdict.UNDECIDED:
            needed = (
                "tokens alone cannot decide it" if self.more_tokens is None else f"{self.more_tokens:,} more needed"
            )
            head += f"; {needed}"
        else:
            head += f"; a deviation of {self.power:.1%} of the tokens would have shown (95 % power)"
        return "\n  ".join([head, *self.evidence])


@dataclass(frozen=True)
class AuditReport:
    """alpha: the chance that a right server is called not lossless, over all results together."""

    server: str
    alpha: float
    results: tuple[Result, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the results: not lossless, undecided, within rounding, lossless."""
        order = list(Verdict)
        return max((result.verdict for result in self.results), key=order.index)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    def __str__(self) -> str:
        head = f"{self.server}: {self.verdict} (chance of a false alarm at most {self.alpha:g})"
        return "\n".join([head, *map(str, self.results)])

    def to_dict(self) -> dict[str, Any]:
        results = [{**asdict(result), "verdict": str(result.verdict)} for result in self.results]
        return {"server": self.server, "verdict": str(self.verdict), "alpha": self.alpha, "results": results}
