"""walk(), which judges a verified tree, and the rules that decide which drafted tokens are accepted.

Lossless: Exact, Block, Traversal. Not lossless: Lenient, Typical, TopN, Margin, CSLeniency, Fuzzy, Ensemble,
NoResidual. A new rule is one file and one entry in RULES, by which texts name it: `fuzzy:js:0.1`.
"""

from typing import Any

from specheads.decoding.acceptance.block import Block
from specheads.decoding.acceptance.ensemble import Ensemble
from specheads.decoding.acceptance.exact import Exact, normalised, residual, walk
from specheads.decoding.acceptance.fsd import fuzzy_from
from specheads.decoding.acceptance.fuzzy import Fuzzy
from specheads.decoding.acceptance.lenient import Lenient, NoResidual
from specheads.decoding.acceptance.rule import Acceptance, LevelRule, TargetProbs, Verdict
from specheads.decoding.acceptance.tokens import CSLeniency, Margin, TokenRule, TopN, Typical
from specheads.decoding.acceptance.traversal import Traversal
from specheads.decoding.registry import Registry
from specheads.options import refuse_class, shown

__all__ = [
    "RULES",
    "Acceptance",
    "Block",
    "CSLeniency",
    "Ensemble",
    "Exact",
    "Fuzzy",
    "Lenient",
    "LevelRule",
    "Margin",
    "NoResidual",
    "TargetProbs",
    "TokenRule",
    "TopN",
    "Traversal",
    "Typical",
    "Verdict",
    "fuzzy_from",
    "normalised",
    "residual",
    "walk",
]  # fmt: skip


_RULES: tuple[type[Acceptance], ...] = (
    Exact, Block, Traversal, NoResidual, Fuzzy, Typical, Lenient, CSLeniency, TopN, Margin, Ensemble,
)  # fmt: skip
RULES: Registry[type[Acceptance]] = Registry("rule", "accept", {rule.name: rule for rule in _RULES})


def rule_named(text: str) -> Acceptance:
    """`NAME[:VALUE…][:KEY=VALUE…]` → the rule. ValueError, one line that quotes the text, if it names none."""
    return RULES.build(text)


def as_rule(accept: Any) -> Acceptance:
    """A rule, its text, or None for the exact one → the rule. ValueError for other text, TypeError for no rule."""
    if accept is None:
        return Exact()
    if isinstance(accept, str):
        return rule_named(accept)
    refuse_class("accept", accept, "rule", "judge")
    if not isinstance(accept, Acceptance):
        raise TypeError(f"accept={shown(accept)} is no acceptance rule; give Exact(), 'fuzzy:js:0.2' or the like")
    return accept


def threshold_field(text: str) -> str | None:
    """The option that says how lossy the rule of that text is; None if it has none. ValueError if it names no rule."""
    return RULES[RULES.parse(text)[0]].threshold_field


def with_threshold(text: str, value: float) -> str:
    """The text of a rule with its threshold set or replaced: `fuzzy:js`, 0.1 → `fuzzy:js:0.1`.

    ValueError for a rule without a threshold, and for a value it refuses.
    """
    name, options = RULES.parse(text)
    field = RULES[name].threshold_field
    if field is None:
        thresholded = [name for name, rule in RULES.items() if rule.threshold_field]
        raise ValueError(f"rule {text!r} has no threshold; {', '.join(thresholded)} have one")
    return RULES.write(RULES.make(text, name, options | {field: f"{value:g}"}))
