"""How far the draft's law is from the target's at a node: the divergences of fuzzy speculative decoding.

In nats, ≥ 0; some may be infinite: KL(q‖p) where p lacks a token of q's, its reverse where q does (at every node behind
a draft vocabulary, as a rule). FSD, arXiv:2502.20704. Shapes: R rows, V vocabulary, n outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.draft_ids import DraftIds


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q‖p) = Σ q log(q / p)."""
    return terms(log_q.exp(), log_q, log_p).clamp_min(0)


def terms(q: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
    """Σ q log(q / p), unclamped."""
    return (log_q - log_p).mul_(q).nansum(-1)  # NaN where q = 0, and nowhere else: such terms are 0


def kl_reversed(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p‖q), of the tokens given alone."""
    return kl(log_p, log_q)


def js_paper(log_q: Tensor, log_p: Tensor) -> Tensor:
    """½KL(m‖q) + ½KL(m‖p), of the tokens given alone, which the official code computes in place of Jensen-Shannon; it
    has no bound."""
    m = torch.logaddexp(log_q, log_p) - math.log(2)
    weight = m.exp()
    return (terms(weight, m, log_q).clamp_min(0) + terms(weight, m, log_p).clamp_min(0)) / 2


def js(q: Tensor, p: Tensor) -> Tensor:
    """Jensen-Shannon, ½KL(q‖m) + ½KL(p‖m), m = (q + p) / 2: at most log 2."""
    # A logarithm of 0, or of 0 / 0, takes a CPU five times as long as one of a number; a law of 0 adds 0 either way.
    least = torch.finfo(p.dtype).tiny
    m = q.lerp(p, 0.5).clamp_min_(least)
    both = [(law / m).clamp_min_(least).log_().mul_(law).sum(-1) for law in (q, p)]
    return (both[0] + both[1]).clamp_min(0) / 2


def tv(q: Tensor, p: Tensor) -> Tensor:
    """Total variation ½Σ|q − p|, at most 1."""
    return (q - p).abs_().sum(-1) / 2


class Form(NamedTuple):
    """What a name stands for: over which outcomes two laws are compared, by what, and does that take logarithms?"""

    over: str  # "top_k", "top_p", or all tokens
    compare: Callable[[Tensor, Tensor], Tensor]
    of_logs: bool

    def takes_law(self, top_p: float) -> bool:
        """Does it start from the law p itself, and not from its logarithm? Over all tokens with any chance a divergence
        of logarithms does not: in float32 the chance of an unlikely one is 0, and its logarithm infinite."""
        return not self.of_logs or (self.over == "top_p" and top_p < 1)


BEYOND = {"js": math.log(2) / 2, "tv": 1 / 2}  # times what p has outside q's tokens
INFINITE = ("kl_reversed", "js_paper")  # where p has any chance outside q's tokens
FORMS = {
    "kl": Form("", kl, True), "kl_reversed": Form("", kl_reversed, True), "js_paper": Form("", js_paper, True),
    "js": Form("", js, False), "tv": Form("", tv, False),
}  # fmt: skip
FORMS |= {
    f"{over}_{name}": FORMS[name]._replace(over=over)
    for over in ("top_k", "top_p")
    for name in ("kl", "js", "js_paper", "tv")
}
NAMES = tuple(FORMS)


def divergence(
    name: str, q: Tensor, p: Tensor, *, k: int, top_p: float, ids: Tensor | None = None, p_is_law: bool = False
) -> Tensor:
    """(R,) the divergence of that name, one of NAMES, of the laws whose scores, log-laws but for a number a row, are q
    and p (R, V), −inf where a token has no chance; k and top_p are for the forms that read them.

    ids (Vd,): q (R, Vd) is of these tokens alone, and all others have no chance there. p_is_law: p is the law itself,
    for one that `takes_law`.
    """
    over, compare, of_logs = FORMS[name]
    to_law = torch.log_softmax if of_logs else torch.softmax
    if over == "top_p" and of_logs and top_p >= 1:
        p = p.log() if p_is_law else p.log_softmax(-1)
        q = q if ids is None else torch.full_like(p, -torch.inf).index_copy_(-1, ids, q)
        q = q.masked_fill(p == -torch.inf, -torch.inf)
        return compare(q.log_softmax(-1), p).masked_fill_(q.amax(-1) == -torch.inf, torch.inf)
    if over == "top_p":
        q, p = nucleus(q, p if p_is_law else p.softmax(-1), ids, top_p)
        p /= p.sum(-1, keepdim=True)
        made, most = compare(to_law(q, -1), p.log() if of_logs else p), q.amax(-1)
        return made.masked_fill_(most == -torch.inf, torch.inf)  # where q gives the nucleus no chance at all
    q, p = to_law(q, -1), p if p_is_law else to_law(p, -1)
    if over == "top_k":
        return compare(*top_k(q, p, ids, k, of_logs))
    if ids is None:
        return compare(q, p)
    inside = p.index_select(-1, ids)  # a smaller draft vocabulary spares the rest of the larger one
    made = compare(q, inside)
    if name in BEYOND:  # to rounding, without another look at a whole vocabulary
        return made + BEYOND[name] * (1 - inside.sum(-1)).clamp_min(0)
    if name in INFINITE:
        return made.masked_fill(p.index_fill(-1, ids, -torch.inf).amax(-1).exp() > 0, torch.inf)
    return made


def smoothed(probs: Tensor, epsilon: float) -> Tensor:
    """(R, V) probabilities, each with epsilon added, renormalised: so that none is 0."""
    raised = probs + epsilon
    return raised / raised.sum(-1, keepdim=True)


def top_k(q: Tensor, p: Tensor, ids: Tensor | None, k: int, logs: bool) -> tuple[Tensor, Tensor]:
    """The chances, or their logs, of the target's k likeliest tokens and, as one more outcome, of all the others
    together: two (R, k + 1) of q and p (R, V)."""
    never = -torch.inf if logs else 0.0
    best, tokens = p.topk(min(k, p.shape[-1]), dim=-1)
    rest_p = p.scatter(-1, tokens, never)
    if ids is None:
        own, rest_q = q.gather(-1, tokens), q.scatter(-1, tokens, never)
    else:
        place = DraftIds.of(ids, p.shape[-1]).index[tokens]
        beyond, place = place < 0, place.clamp_min(0)
        own = q.gather(-1, place).masked_fill_(beyond, never)
        rest_q = q.scatter_reduce(-1, place, torch.full_like(own, never).masked_fill_(beyond, torch.inf), "amin")
    total = torch.logsumexp if logs else torch.sum
    return torch.cat([own, total(rest_q, -1, keepdim=True)], -1), torch.cat([best, total(rest_p, -1, keepdim=True)], -1)


def nucleus(q: Tensor, p: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Of scores q and the law p, (R, n): the fewest of the target's likeliest tokens that hold `top_p` of it, and those
    as likely as the last of these; −inf and 0 for others."""
    if ids is not None:
        q = torch.full_like(p, -torch.inf).index_copy_(-1, ids, q)
    least = least_within(p, top_p)
    outside = p < least
    return q.masked_fill(outside, -torch.inf), p.masked_fill(outside, 0)


def least_within(share: Tensor, top_p: float) -> Tensor:
    """Of laws (R, V): (R, 1) the smallest share in each row's nucleus, above 0."""
    rising = share.sort(-1).values
    held = rising.cumsum(-1)
    last = torch.searchsorted(held, held[:, -1:] - top_p, right=True).clamp(max=share.shape[1] - 1)
    return rising.gather(-1, last).clamp_min(torch.finfo(share.dtype).tiny)
