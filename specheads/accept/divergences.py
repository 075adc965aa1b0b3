"""How far the draft's law is from the target's at a node: the divergences of fuzzy speculative decoding.

Each takes log q and log p (R, V), −inf where a token has no chance, and gives (R,) ≥ 0, in nats. A divergence may be
infinite: KL(q‖p) where p lacks a token of q's, its reverse where q does (at every node behind a draft vocabulary,
as a rule). FSD, arXiv:2502.20704. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specheads.law import DraftIds

# log q, log p (R, n), and whether p has a part beyond, where q has none
Divergence = Callable[[Tensor, Tensor, bool], Tensor]
NUCLEUS = 512  # tokens looked at before a whole vocabulary is


def kl(log_q: Tensor, log_p: Tensor, beyond: bool = False) -> Tensor:
    """KL(q‖p) = Σ q log(q / p)."""
    return terms(log_q.exp(), log_q, log_p).clamp_min(0)


def terms(q: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
    """Σ q log(q / p), unclamped."""
    return (log_q - log_p).mul_(q).nansum(-1)  # NaN where q = 0, and nowhere else: such terms are 0


def kl_reversed(log_q: Tensor, log_p: Tensor, beyond: bool = False) -> Tensor:
    """KL(p‖q), of the tokens given alone."""
    return kl(log_p, log_q)


def js(log_q: Tensor, log_p: Tensor, beyond: bool = False) -> Tensor:
    """Jensen-Shannon, ½KL(q‖m) + ½KL(p‖m), m = (q + p) / 2: at most log 2."""
    q, p = log_q.exp(), log_p.exp()
    m = (q + p).div_(2).log_()
    both = terms(q, log_q, m) + terms(p, log_p, m)
    return (both + missing(p) * math.log(2) if beyond else both).clamp_min(0) / 2


def js_paper(log_q: Tensor, log_p: Tensor, beyond: bool = False) -> Tensor:
    """½KL(m‖q) + ½KL(m‖p), of the tokens given alone, which the official code computes in place of Jensen-Shannon; it
    has no bound."""
    m = torch.logaddexp(log_q, log_p) - math.log(2)
    weight = m.exp()
    return (terms(weight, m, log_q).clamp_min(0) + terms(weight, m, log_p).clamp_min(0)) / 2


def tv(log_q: Tensor, log_p: Tensor, beyond: bool = False) -> Tensor:
    """Total variation ½Σ|q − p|, at most 1."""
    q, p = log_q.exp(), log_p.exp()
    apart = (q - p).abs_().sum(-1)
    return (apart + missing(p) if beyond else apart) / 2


def missing(p: Tensor) -> Tensor:
    """(R, n) → (R,) what p lacks of 1, to rounding, without another look at a whole vocabulary."""
    return (1 - p.sum(-1)).clamp_min(0)


def over_top_k(whole: Divergence, log_q: Tensor, log_p: Tensor, ids: Tensor | None, k: int) -> Tensor:
    """(R,) over the target's k likeliest tokens and, as one more, all the others together."""
    best, top = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    rest_p = log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    if ids is None:
        q, others = log_q.gather(-1, top), log_q.scatter(-1, top, -torch.inf)
    else:
        place = DraftIds.of(ids, log_p.shape[-1]).place[top]
        beyond, place = place < 0, place.clamp_min(0)
        q = log_q.gather(-1, place).masked_fill_(beyond, -torch.inf)
        others = log_q.scatter_reduce(-1, place, torch.full_like(q, -torch.inf).masked_fill_(beyond, torch.inf), "amin")
    rest_q = others.logsumexp(-1, keepdim=True)
    return whole(torch.cat([q, rest_q], -1), torch.cat([best, rest_p], -1), False)


def over_top_p(whole: Divergence, log_q: Tensor, log_p: Tensor, ids: Tensor | None, top_p: float) -> Tensor:
    """(R,) over the fewest of the target's likeliest tokens that hold `top_p` of it, and those as likely as the last of
    these, renormalised; infinite where q gives them no chance at all."""
    size = log_p.shape[-1]
    # Most nuclei are small, and to sort a whole vocabulary takes long; a GPU would wait to be told which are.
    widths = [NUCLEUS] if log_p.device.type == "cpu" and size > NUCLEUS else []
    rows, made = torch.arange(len(log_p), device=log_p.device), log_p.new_empty(len(log_p))
    for width in [*widths, size]:
        own, law = log_p[rows], log_q[rows]
        if width < size:
            own, tokens = own.topk(width, dim=-1, sorted=False)
            law = of_tokens(law, tokens, ids, size)
        elif ids is not None:
            law = torch.full_like(own, -torch.inf).index_copy_(-1, ids, law)
        share = own.exp()
        beyond = (share < nucleus_floor(share, top_p)) | (share == 0)
        p, q = (one.masked_fill(beyond, -torch.inf).log_softmax(-1) for one in (own, law))
        apart = q.isnan().any(-1)  # q gives the nucleus no chance
        made[rows] = torch.where(apart, torch.inf, whole(q, p, False))
        if width < size:
            rows = rows[share.sum(-1) < top_p]
            if not len(rows):
                break
    return made


def nucleus_floor(share: Tensor, top_p: float) -> Tensor:
    """(R, 1) the probability of the last of the fewest likeliest tokens of share (R, n) that hold `top_p`."""
    if share.device.type == "cpu":  # numpy sorts several times faster than torch, which also finds the places
        ordered = torch.from_numpy(np.sort(share.numpy(), -1)).flip(-1)
    else:
        ordered = share.sort(-1, descending=True).values
    inside = ordered.cumsum(-1) - ordered < top_p
    return ordered.gather(-1, inside.sum(-1, keepdim=True) - 1)


def of_tokens(log_q: Tensor, tokens: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """(R, n) log q (R, Vd), of the tokens ids (Vd,) alone, at tokens (R, n)."""
    if ids is None:
        return log_q.gather(-1, tokens)
    place = DraftIds.of(ids, vocab_size).place[tokens]
    return log_q.gather(-1, place.clamp_min(0)).masked_fill_(place < 0, -torch.inf)


WHOLE: dict[str, Divergence] = {"kl": kl, "kl_reversed": kl_reversed, "js": js, "tv": tv, "js_paper": js_paper}
INFINITE = ("kl_reversed", "js_paper")  # where p has any chance outside q's tokens
REDUCED = ("kl", "js", "tv")  # those with a top_k_ and a top_p_ form
NAMES = (*WHOLE, *(form + name for form in ("top_k_", "top_p_") for name in REDUCED))


def divergence(name: str, log_q: Tensor, log_p: Tensor, *, k: int, top_p: float, ids: Tensor | None = None) -> Tensor:
    """(R,) the divergence of that name, one of NAMES; k and top_p are for the forms that read them.

    ids (Vd,): log_q (R, Vd) is of these tokens alone, and all others have no chance there.
    """
    if name in WHOLE and ids is None:
        return WHOLE[name](log_q, log_p, False)
    if name in WHOLE:  # a smaller draft vocabulary spares the rest of the larger one
        assert ids is not None
        made = WHOLE[name](log_q, log_p.index_select(-1, ids), True)
        if name not in INFINITE:
            return made
        return made.masked_fill(log_p.index_fill(-1, ids, -torch.inf).amax(-1).exp() > 0, torch.inf)
    form, whole = name[: len("top_k_")], WHOLE[name[len("top_k_") :]]
    if form == "top_k_":
        return over_top_k(whole, log_q, log_p, ids, k)
    return over_top_p(whole, log_q, log_p, ids, top_p)
