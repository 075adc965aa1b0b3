"""Rules by name: what the command line writes is the rule it means, and bad text is one clear line."""

import pytest

from specheads import Block, CSLeniency, Ensemble, Exact, Fuzzy, Lenient, Margin, TopN, Traversal, Typical
from specheads.decoding.acceptance import RULES, NoResidual, rule_named, with_threshold

WRITTEN = {
    "exact": Exact(),
    "block": Block(),
    "traversal": Traversal(),
    "no_residual": NoResidual(),
    "fuzzy:js:0.1": Fuzzy(0.1),
    "fuzzy:top_k_kl:2:rescue": Fuzzy(2.0, "top_k_kl", "rescue"),
    "fuzzy:tv:0.3:processed=true:k=5": Fuzzy(0.3, "tv", k=5, processed=True),
    "fuzzy:js:0.1:rescue:top_p=0.8": Fuzzy(0.1, mode="rescue", top_p=0.8),
    "fuzzy:top_k_js_paper:0.1:epsilon=0.001:warpers=temperature+top_p": Fuzzy(
        0.1, "top_k_js_paper", warpers="temperature+top_p", epsilon=0.001
    ),
    "typical": Typical(),
    "typical:0.2": Typical(0.2),
    "typical:0.09:0.5": Typical(0.09, 0.5),
    "lenient:0.5": Lenient(0.5),
    "cs_leniency:3": CSLeniency(3.0),
    "topn": TopN(),
    "topn:3:0.2": TopN(3, 0.2),
    "margin:0.9": Margin(0.9),
    "ensemble:0.5": Ensemble(0.5),
}


def test_a_text_is_the_rule_it_names_and_the_rule_writes_it_back():
    for text in WRITTEN:
        assert rule_named(text) == WRITTEN[text]
        assert rule_named(RULES.write(WRITTEN[text])) == WRITTEN[text]


def test_every_rule_has_a_name_and_names_may_be_given_with_options_in_any_order():
    assert {type(rule) for rule in WRITTEN.values()} == set(RULES.values())
    assert rule_named(" Fuzzy : threshold=0.1 : kl ") == Fuzzy(0.1, "kl")
    assert rule_named("topn:margin=0.5:4") == TopN(4, 0.5)
    assert RULES.write(Fuzzy(0.05)) == "fuzzy:js:0.05" and RULES.write(Typical()) == "typical"
    assert RULES.write(Typical(delta=0.5)) == "typical:0.09:0.5"


def test_a_threshold_replaces_the_one_that_is_there_or_comes_where_there_is_none():
    assert with_threshold("fuzzy:js", 0.05) == with_threshold("fuzzy:js:0.4", 0.05) == "fuzzy:js:0.05"
    assert rule_named(with_threshold("fuzzy:tv:0.4:rescue", 0.5)) == Fuzzy(0.5, "tv", "rescue")
    for name, rule in RULES.items():
        if (field := rule.threshold_field) is None:
            continue
        assert getattr(rule_named(with_threshold(name, 1.0 if name == "cs_leniency" else 0.5)), field) in (0.5, 1.0)
    with pytest.raises(ValueError, match="has no threshold"):
        with_threshold("exact", 0.1)


def test_a_text_that_is_no_rule_is_refused_in_one_line_that_quotes_it():
    for text, said in [
        ("fuzy:js:0.1", "did you mean 'fuzzy'"), ("", "unknown rule"), ("fuzzy", "threshold is missing"),
        ("fuzzy:jss:0.1", "unknown divergence 'jss'; did you mean 'js'"), ("fuzzy:js:-1", "threshold=-1"),
        ("fuzzy:js:wide", "threshold='wide' is not a number"), ("fuzzy:js:0.1:rescue:1", "one value too many"),
        ("exact:1", "one value too many"), ("topn:2.5", "n='2.5'"),
        ("typical:epsilon=0.1:eps=1", "unknown option of typical"), ("margin:0.5:ratio=0.4", "given twice"),
        ("fuzzy:js:0.1:processed=yes", "neither true nor false"), ("lenient:2", "at most 1"),
        ("fuzzy:js:nan", "threshold=nan"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said.replace("(", r"\(")) as refused:
            rule_named(text)
        assert repr(text) in str(refused.value) and "\n" not in str(refused.value)
