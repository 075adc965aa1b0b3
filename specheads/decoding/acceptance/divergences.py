"""Divergences between the draft's distribution q and the target's p at a node, under the names of FSD.

In nats, ≥ 0. "kl" is the reverse KL(q‖p), "kl_reversed" the forward KL(p‖q). They may be infinite: KL(q‖p) if p lacks
a token of q's, KL(p‖q) if q lacks one of p's (the usual case with a draft vocabulary).
Fuzzy speculative decoding (FSD), arXiv:2502.20704. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specheads.decoding.probs.divergences import forward_kl, js, log_mixture, reverse_kl, tv


def js_paper(log_q: Tensor, log_p: Tensor) -> Tensor:
    """½ KL(m‖q) + ½ KL(m‖p) with m = (p + q) / 2, which the official code computes instead of Jensen–Shannon;
    unbounded."""
    log_m = log_mixture(log_q, log_p)
    return (forward_kl(log_q, log_m) + forward_kl(log_p, log_m)) / 2


_WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": reverse_kl, "kl_reversed": forward_kl, "js_paper": js_paper, "js": js, "tv": tv,
}  # fmt: skip
# Name → the outcomes it compares ("top_k", "top_p", or "" for all tokens) and the divergence over them.
_FORMS = {name: ("", compare) for name, compare in _WHOLE.items()} | {
    f"{over}_{name}": (over, _WHOLE[name]) for over in ("top_k", "top_p") for name in ("kl", "js", "js_paper", "tv")
}
NAMES = tuple(_FORMS)


def divergence(name: str, q: Tensor, p: Tensor, *, k: int, top_p: float, ids: Tensor | None = None) -> Tensor:
    """(R,) the divergence called `name`, one of NAMES, of the distributions with logits q and p (R, V).

    A logit is −inf for a token of probability 0. k, top_p: for the "top_k_…" and "top_p_…" forms. ids (Vd,): q (R, Vd)
    has logits of these tokens only; the others have probability 0.
    """
    over, compare = _FORMS[name]
    if ids is not None:
        q = torch.full_like(p, -torch.inf).index_copy_(-1, ids, q)
    if over == "top_p":
        outside = outside_nucleus(p, top_p)
        q, p = q.masked_fill(outside, -torch.inf), p.masked_fill(outside, -torch.inf)
    log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
    if over == "top_k":
        log_q, log_p = merge_rest(log_q, log_p, k)
    found = compare(log_q, log_p).clamp_min(0)
    if over == "top_p":  # if q gives the whole nucleus probability 0
        found = found.masked_fill(q.amax(-1) == -torch.inf, torch.inf)
    return found


def add_to_probs(probs: Tensor, epsilon: float) -> Tensor:
    """(R, V) probabilities, each with epsilon added so that none is 0, renormalised."""
    raised = probs + epsilon
    return raised / raised.sum(-1, keepdim=True)


def merge_rest(log_q: Tensor, log_p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both (R, V) → both (R, k + 1): the target's k likeliest tokens, and one outcome that merges all others."""
    best, tokens = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    rest_q, rest_p = (one.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True) for one in (log_q, log_p))
    return torch.cat([log_q.gather(-1, tokens), rest_q], -1), torch.cat([best, rest_p], -1)


def outside_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """(R, V) bool: is each token outside the nucleus, the smallest set of likeliest tokens that holds `top_p`?

    Tokens as likely as the last of these are inside. At top_p = 1 so is every token of nonzero probability.
    """
    if top_p >= 1:  # by logits: an unlikely token's probability underflows in float32
        return logits == -torch.inf
    probs = logits.softmax(-1)
    rising = probs.sort(-1).values
    held = rising.cumsum(-1)
    last = torch.searchsorted(held, held[:, -1:] - top_p, right=True).clamp(max=probs.shape[1] - 1)
    return probs < rising.gather(-1, last).clamp_min(torch.finfo(probs.dtype).tiny)
