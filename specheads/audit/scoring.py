"""What the base says of a server's text: its scores before each token, and how much of them is rounding.

Shapes: n tokens of a text, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.audit.checks import edge_mass
from specheads.audit.settings import Settings, process

ROWS, EXTRA = 3, 5  # the second pass: so many equal rows, each with so many tokens more
# A server's rounding error is a second draw of ours: its distance to us is taken as at most twice what we measure.
SAFETY = 2.0
ROUNDINGS = 4  # of float32, that a score may be off at least


class ForeignToken(ValueError):
    """A token that the base does not have."""


@dataclass(frozen=True)
class ScoredText:
    """raw (n, V): the base's logits given the server's own prefix; uncut (n, V): after penalty and temperature; scores
    (n, V): after top-k, top-p and min-p too; tokens (n,); previous (n,): the token before each; margin: the largest gap
    of two scores that rounding explains; shift (n,): the total variation of each distribution that it explains."""

    prompt: tuple[int, ...]
    tokens: Tensor
    previous: Tensor
    raw: Tensor
    uncut: Tensor
    scores: Tensor
    margin: float
    shift: Tensor


class Scorer:
    """Scores texts by the base. dtype: the server's; None: the base's own. The base is run in two widths (and, if the
    server has another dtype, in both dtypes), and the difference is what rounding explains."""

    def __init__(self, base: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self.base = base.eval()
        other = dtype is not None and dtype != base.dtype
        self.second = copy.deepcopy(base).to(dtype) if other else base  # type: ignore[arg-type]

    @torch.no_grad()
    def score(self, prompt: list[int], tokens: list[int], settings: Settings) -> ScoredText:
        """ValueError for an empty prompt or text; ForeignToken for ids that the base does not have."""
        if not prompt or not tokens:
            raise ValueError(f"a prompt of {len(prompt)} and a text of {len(tokens)} tokens: neither may be empty")
        vocabulary = self.base.get_input_embeddings().weight.shape[0]
        text = [*prompt, *tokens]
        if not 0 <= min(text) <= max(text) < vocabulary:
            raise ForeignToken(f"token {max(text)}: the base has {vocabulary}")
        first = self._logits(self.base, text, len(prompt))
        wide = self._logits(self.second, text, len(prompt), ROWS, EXTRA)
        before_cut = replace(settings, top_k=0, top_p=1.0, min_p=0.0)
        uncut, again = (process(logits, prompt, tokens, before_cut) for logits in (first, wide))
        margin, shift = rounding(uncut, again)
        scores, shifts = cut(uncut, settings, margin, shift)
        device = first.device
        return ScoredText(
            tuple(prompt), torch.tensor(tokens, device=device), torch.tensor(text[len(prompt) - 1 : -1], device=device),
            first, uncut, scores, margin, shifts,
        )  # fmt: skip

    def _logits(self, model: PreTrainedModel, text: list[int], start: int, rows: int = 1, extra: int = 0) -> Tensor:
        """(n, V) logits before each token from `start` on, in float32."""
        ids = torch.tensor([[*text, *text[:extra]]] * rows, device=model.device)
        return model(ids, use_cache=False).logits[0, start - 1 : len(text) - 1].float()


def rounding(scores: Tensor, again: Tensor) -> tuple[float, float]:
    """(margin, shift) from two passes' scores (n, V), SAFETY times the largest of the text.

    margin: two scores' errors together; at least those of a few roundings of float32, as two passes may sum alike where
    a server does not. shift: the total variation of the two distributions.
    """
    both = scores.isfinite() & again.isfinite()
    error = torch.where(both, scores - again, 0.0).abs().max()
    least = ROUNDINGS * torch.finfo(torch.float32).eps * torch.where(both, scores, 0.0).abs().max()
    shift = (scores.softmax(-1) - again.softmax(-1)).abs().sum(-1).max() / 2
    return SAFETY * 2 * float(torch.maximum(error, least)), SAFETY * float(shift)


def cut(uncut: Tensor, settings: Settings, margin: float, shift: float) -> tuple[Tensor, Tensor]:
    """Scores (n, V) after top-k, top-p and min-p in turn, and shift (n,) with what moving edges add to it."""
    scores, shifts = uncut, torch.full(uncut.shape[:1], shift, dtype=torch.float64, device=uncut.device)
    for one_cut in (Settings(top_k=settings.top_k), Settings(top_p=settings.top_p), Settings(min_p=settings.min_p)):
        after = process(scores, [], [], one_cut)
        shifts = shifts + edge_mass(after, scores, one_cut, margin, shift)
        scores = after
    return scores, shifts
