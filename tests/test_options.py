"""Options by name: what the message of an unknown one says."""

import pytest

from specheads.options import refuse_unknown


def test_known_names_pass_and_the_first_unknown_one_is_named_with_its_nearest():
    refuse_unknown(["rows", "steps"], ["steps", "rows"])
    with pytest.raises(ValueError, match=r"^unknown data option 'run\.row'; did you mean 'run\.rows'\?$"):
        refuse_unknown(["steps", "row", "stesp"], ["steps", "rows"], what="data option", section="run.")


def test_where_no_name_is_near_the_known_ones_are_listed_but_not_without_end():
    with pytest.raises(ValueError, match=r"^unknown option 'zzz'; known: steps, rows$"):
        refuse_unknown(["zzz"], ["steps", "rows"])
    with pytest.raises(ValueError, match=r"known: n0, .*, n23, …$"):
        refuse_unknown(["zzz"], (f"n{i}" for i in range(100)))
    with pytest.raises(ValueError, match=r"unknown option '3'"):
        refuse_unknown([3], ["rows"])  # YAML's keys need not be text
