"""An acceptance rule that counts drafted and accepted tokens before an end token cuts the text."""

from __future__ import annotations

from specheads.decoding.acceptance import Acceptance, Exact, TargetProbs, Verdict
from specheads.decoding.probs.sampler import Sampler


class Witness(Acceptance):
    """Wraps another rule, for chains and one row. drafted, accepted: numbers of tokens so far.

    An end token may be in the middle of a draft. The reference functions count the whole draft, including tokens
    accepted after the end token; `Step` counts only those in the text.
    """

    def __init__(self, rule: Acceptance) -> None:
        self.rule = rule
        self.drafted = self.accepted = 0
        self._last: tuple[list[int], int] = ([], 0)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def requires_draft_probs(self) -> bool:
        return self.rule.requires_draft_probs

    @property
    def uses_draft_probs(self) -> bool:
        return self.rule.uses_draft_probs

    def is_exact(self, sampler: Sampler) -> bool:
        return False  # otherwise judge() would not be called

    def judge(self, target: TargetProbs) -> Verdict:
        rule = Exact() if self.rule.is_exact(target.sampler) else self.rule
        verdict = rule.judge(target)
        nodes = zip(target.tree.tokens[0].tolist(), target.tree.topology.drafted[0].tolist(), strict=True)
        draft, accepted = [token for token, drafted in nodes if drafted], int(verdict.length[0]) - 1
        self.drafted, self.accepted = self.drafted + len(draft), self.accepted + accepted
        self._last = draft, accepted
        return verdict

    def take(self) -> tuple[list[int], int]:
        """The last step's draft, and the number of its tokens that were accepted; ([], 0) if nothing was drafted."""
        last, self._last = self._last, ([], 0)
        return last

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0
