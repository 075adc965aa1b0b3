"""Rules by name, as the command line, recipes and the console write them: `fuzzy:js:0.1`, `topn:10:margin=0.3`."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from specheads.decoding.acceptance.block import Block
from specheads.decoding.acceptance.ensemble import Ensemble
from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.fuzzy import Fuzzy
from specheads.decoding.acceptance.lenient import Lenient
from specheads.decoding.acceptance.no_residual import NoResidual
from specheads.decoding.acceptance.rule import Acceptance
from specheads.decoding.acceptance.tokens import CSLeniency, Margin, TopN, Typical
from specheads.decoding.acceptance.traversal import Traversal
from specheads.options import refuse_class, refuse_unknown, shown

# Each with the options that may be written without their name, in this order; any other is written KEY=VALUE.
RULES: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "exact": (Exact, ()),
    "block": (Block, ()),
    "traversal": (Traversal, ()),
    "no_residual": (NoResidual, ()),
    "unadjusted": (NoResidual, ()),  # an older name
    "fuzzy": (Fuzzy, ("divergence", "threshold", "mode")),
    "typical": (Typical, ("epsilon", "delta")),
    "lenient": (Lenient, ("leniency",)),
    "cs_leniency": (CSLeniency, ("leniency",)),
    "topn": (TopN, ("n", "margin")),
    "margin": (Margin, ("ratio",)),
    "ensemble": (Ensemble, ("weight",)),
}
# The option of each lossy rule that says how much it lets pass.
THRESHOLDS = {
    "fuzzy": "threshold", "typical": "epsilon", "lenient": "leniency", "cs_leniency": "leniency", "topn": "margin",
    "margin": "ratio", "ensemble": "weight",
}  # fmt: skip
EXPECTED = (
    "expected exact, block, traversal, no_residual, fuzzy:DIVERGENCE:THRESHOLD[:MODE], typical[:EPSILON[:DELTA]], "
    "lenient:LENIENCY, cs_leniency:LENIENCY, topn[:N[:MARGIN]], margin:RATIO or ensemble:WEIGHT"
)


def rule_named(text: str) -> Acceptance:
    """`NAME[:VALUE…][:KEY=VALUE…]` → the rule. ValueError, in one line that quotes the text, for what is none."""
    return _made(text, *_parts(text))


def as_rule(accept: Any) -> Acceptance:
    """A rule, its text, or None for the exact one → the rule. ValueError for other text, TypeError for what is none."""
    if accept is None:
        return Exact()
    if isinstance(accept, str):
        return rule_named(accept)
    refuse_class("accept", accept, "rule", "judge")
    if not hasattr(accept, "lossless"):
        raise TypeError(f"accept={shown(accept)} is no acceptance rule; give Exact(), 'fuzzy:js:0.2' or the like")
    return accept


def with_threshold(text: str, value: float) -> str:
    """The rule of that text, which need not have a threshold yet, with this one: `fuzzy:js`, 0.1 → `fuzzy:js:0.1`.

    The threshold is the option in THRESHOLDS. ValueError for a rule that has none, and for a value it refuses.
    """
    name, given = _parts(text)
    if name not in THRESHOLDS:
        raise ValueError(f"rule {text!r} has no threshold; {', '.join(THRESHOLDS)} have one")
    return rule_text(_made(text, name, given | {THRESHOLDS[name]: f"{value:g}"}))


def rule_text(rule: Acceptance) -> str:
    """The shortest text that `rule_named` makes the rule of, an option at its default left out where it can be."""
    name, (_, order) = next((name, entry) for name, entry in RULES.items() if entry[0] is type(rule))
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(typing.cast(Any, rule))}
    defaults = {f.name: f.default for f in dataclasses.fields(typing.cast(Any, rule))}
    positional = list(order)
    while positional and values[positional[-1]] == defaults[positional[-1]]:
        positional.pop()
    shown = [_shown(values[key]) for key in positional]
    shown += [f"{k}={_shown(v)}" for k, v in values.items() if k not in order and v != defaults[k]]
    return ":".join([name, *shown])


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """The rule's name, and its options as they are written."""
    name, *words = (part.strip() for part in text.split(":"))
    name = name.lower()
    try:
        refuse_unknown([name], RULES, "rule")
    except ValueError as error:
        raise ValueError(f"accept {text!r}: {error}; {EXPECTED}") from error
    order = list(RULES[name][1])
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            free = [key for key in order if key not in given]
            if not free:
                raise ValueError(f"accept {text!r}: {word!r} is one value too many; {EXPECTED}")
            key, value = free[0], word
        if key in given:
            raise ValueError(f"accept {text!r}: {key} is given twice")
        given[key] = value
    return name, given


def _made(text: str, name: str, given: dict[str, str]) -> Acceptance:
    kind = RULES[name][0]
    types = {key: hint for key, hint in typing.get_type_hints(kind).items() if key in kind.__dataclass_fields__}
    try:
        refuse_unknown(given, types, f"option of {name}")
        values = {key: _read(key, value, types[key]) for key, value in given.items()}
        missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
        if missing := [key for key in missing if key not in values]:
            raise ValueError(f"{missing[0]} is missing; {EXPECTED}")
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"accept {text!r}: {error}") from error


def _read(key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text!r} is neither true nor false")
        return text == "true"
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{key}={text!r} is not {what}") from error


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
