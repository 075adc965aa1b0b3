"""fuzzy_from(): the rule that the arguments of the official FSD code ask for, under its names.

p: target probabilities, q: draft probabilities, m = (p + q) / 2. FSD, arXiv:2502.20704.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specheads.decoding.acceptance.divergences import NAMES
from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.fuzzy import WARPERS, Fuzzy
from specheads.decoding.acceptance.rule import Acceptance
from specheads.options import refuse_unknown, shown

# That code's names → `Fuzzy`'s names of what it computes: its "js" is not Jensen–Shannon.
TYPES = {"kl_div": "kl", "kl_div_reversed": "kl_reversed", "js_div": "js_paper", "tv_div": "tv"}
TYPES |= {
    f"{over}_{name}": f"{over}_{TYPES[name]}" for over in ("top_k", "top_p") for name in TYPES if "rev" not in name
}
EPSILON = 1e-10  # what it adds to each processed probability


def fuzzy_from(
    fsd_div_type: str | None = "js_div",
    fsd_div_threshold: float | None = None,
    fsd_div_logit_processor: str | Iterable[str] | None = None,
    **options: Any,
) -> Acceptance:
    """The rule that the official FSD code's arguments ask for; `Exact` for a threshold of None and for type "sd".

    fsd_div_type: a name with "_div" means what that code computes: "kl_div" KL(q‖p), "kl_div_reversed" KL(p‖q),
    "js_div" ½KL(m‖p) + ½KL(m‖q) (`Fuzzy`'s "js_paper"), "tv_div" ½Σ|p − q|; "top_k_…" (kl, js, tv) over the target's
    50 likeliest tokens and one bucket for the rest; "top_p_…" over its nucleus, where that code stops with an error.
    All are in nats, from raw logits; "…_processed" from logits under the call's processors, smoothed by 1e-10, except
    "kl_div_reversed_processed", which uses raw logits there too. "random" as in `Fuzzy`. None is "js_div". A name
    without "_div" is `Fuzzy`'s own: "js" is the true Jensen–Shannon.
    fsd_div_logit_processor: the call's warpers that the divergence sees, any of "temperature", "top_k" and "top_p",
    smoothed as above; a "…_processed" type ignores it. options are Fuzzy's own.
    """
    name = fsd_div_type or "js_div"
    plain = name.removesuffix("_processed") if isinstance(name, str) else name
    refuse_unknown([plain], [*TYPES, "random", "sd", *NAMES], "fsd_div_type")
    warpers = _warper_names(fsd_div_logit_processor)
    if plain == "sd" or fsd_div_threshold is None:
        return Exact()
    chosen: dict[str, Any] = {"processed": name != plain and plain != "kl_div_reversed"}
    if not chosen["processed"]:
        chosen["warpers"] = "+".join(warpers)
    if plain in TYPES and (chosen["processed"] or warpers):
        chosen["epsilon"] = EPSILON
    return Fuzzy(fsd_div_threshold, TYPES.get(plain, plain), **{**chosen, **options})


def _warper_names(given: str | Iterable[Any] | None) -> list[str]:
    """Names of warpers, each once, in the order they are applied. ValueError for anything else."""
    names = re.findall(r"\w+", given) if isinstance(given, str) else given or []
    names = list(names) if isinstance(names, Iterable) else [names]
    if any(name not in list(WARPERS) for name in names):  # list(): an unhashable name is no error here
        raise ValueError(
            f"fsd_div_logit_processor={shown(given)} must name the call's own warpers, of {', '.join(WARPERS)}, as in "
            "('temperature', 'top_p')"
        )
    return [name for name in WARPERS if name in names]
