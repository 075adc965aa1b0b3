"""How far the draft's law is from the target's at a node: the divergences of fuzzy speculative decoding.

Each takes log q and log p (R, V), −inf where a token has no chance, and gives (R,) ≥ 0, in nats. A divergence may be
infinite: KL(q‖p) where p lacks a token of q's, its reverse where q does (at every node behind a draft vocabulary,
as a rule). FSD, arXiv:2502.20704. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specheads.accept.rule import known_all

# log q, log p (R, n), and the part of p (R,) or () that stands where q has none, left out of both
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
NUCLEI = (64, 512)  # tokens looked at before a whole vocabulary is sorted


def kl(log_q: Tensor, log_p: Tensor, outside: Tensor) -> Tensor:
    """KL(q‖p) = Σ q log(q / p)."""
    return terms(log_q.exp(), log_q, log_p).clamp_min(0)


def terms(q: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
    """Σ q log(q / p), unclamped."""
    return (q * (log_q - log_p)).nansum(-1)  # NaN where q = 0, and nowhere else: such terms are 0


def kl_reversed(log_q: Tensor, log_p: Tensor, outside: Tensor) -> Tensor:
    """KL(p‖q)."""
    return kl(log_p, log_q, outside).masked_fill(outside > 0, torch.inf)


def js(log_q: Tensor, log_p: Tensor, outside: Tensor) -> Tensor:
    """Jensen-Shannon, ½KL(q‖m) + ½KL(p‖m), m = (q + p) / 2: at most log 2."""
    q, p = log_q.exp(), log_p.exp()
    m = ((q + p) / 2).log()
    return (terms(q, log_q, m) + terms(p, log_p, m) + outside * math.log(2)).clamp_min(0) / 2


def js_paper(log_q: Tensor, log_p: Tensor, outside: Tensor) -> Tensor:
    """½KL(m‖q) + ½KL(m‖p), which the official code computes in place of Jensen-Shannon; it has no bound."""
    m = torch.logaddexp(log_q, log_p) - math.log(2)
    return ((kl(m, log_q, outside) + kl(m, log_p, outside)) / 2).masked_fill(outside > 0, torch.inf)


def tv(log_q: Tensor, log_p: Tensor, outside: Tensor) -> Tensor:
    """Total variation ½Σ|q − p|, at most 1."""
    return ((log_q.exp() - log_p.exp()).abs().sum(-1) + outside) / 2


def top_k_and_rest(log_q: Tensor, log_p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both laws over the target's k likeliest tokens and, as one more, all the others together: (R, k + 1)."""
    ids = log_p.topk(min(k, log_p.shape[-1]), dim=-1).indices

    def merged(log_law: Tensor) -> Tensor:
        rest = log_law.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([log_law.gather(-1, ids), rest], -1)

    return merged(log_q), merged(log_p)


def nucleus(log_q: Tensor, log_p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Both laws over the fewest of the target's likeliest tokens that hold `top_p` of it, renormalised: (R, n).

    n is as wide as the widest nucleus or wider. Where q gives those no chance at all its row is NaN.
    """
    for width in NUCLEI:
        best, ids = log_p.topk(min(width, log_p.shape[-1]), dim=-1)
        if known_all(best.exp().sum(-1) >= top_p):
            break
    else:  # a wide nucleus somewhere
        best, ids = log_p.sort(-1, descending=True)
    share = best.exp()
    outside = (share.cumsum(-1) - share >= top_p) | (share == 0)

    def renormalised(log_law: Tensor) -> Tensor:
        return log_law.masked_fill(outside, -torch.inf).log_softmax(-1)

    return renormalised(log_q.gather(-1, ids)), renormalised(best)


WHOLE: dict[str, Divergence] = {"kl": kl, "kl_reversed": kl_reversed, "js": js, "tv": tv, "js_paper": js_paper}
INFINITE = ("kl_reversed", "js_paper")  # where p has any chance outside q's tokens
REDUCED = ("kl", "js", "tv")  # those with a top_k_ and a top_p_ form
NAMES = (*WHOLE, *(form + name for form in ("top_k_", "top_p_") for name in REDUCED))


def divergence(name: str, log_q: Tensor, log_p: Tensor, *, k: int, top_p: float, ids: Tensor | None = None) -> Tensor:
    """(R,) the divergence of that name, one of NAMES; k and top_p are for the forms that read them.

    ids (Vd,): log_q (R, Vd) is of these tokens alone, and all others have no chance there.
    """
    outside = log_p.new_zeros(())
    if name in WHOLE:
        if ids is not None:  # a smaller draft vocabulary spares the rest of the larger one
            inside = log_p.index_select(-1, ids)
            if name in INFINITE:
                outside = log_p.index_fill(-1, ids, -torch.inf).logsumexp(-1).exp()
            else:  # to rounding, without another look at the whole vocabulary
                outside = (1 - inside.exp().sum(-1)).clamp_min(0)
            log_p = inside
        return WHOLE[name](log_q, log_p, outside)
    if ids is not None:
        log_q = torch.full_like(log_p, -torch.inf).index_copy_(-1, ids, log_q)
    form, whole = name[: len("top_k_")], WHOLE[name[len("top_k_") :]]
    if form == "top_k_":
        return whole(*top_k_and_rest(log_q, log_p, k), outside)
    log_q, log_p = nucleus(log_q, log_p, top_p)
    apart = log_q.isnan().any(-1)  # q gives the nucleus no chance at all
    return torch.where(apart, torch.inf, whole(log_q, log_p, outside))
