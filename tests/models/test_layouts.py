"""The table of published layouts in docs/compatibility.md is what happens to them here."""

import pytest

from tests.support.layouts import LAYOUTS, in_docs, outcome, row


def test_every_layout_is_in_the_docs_once_and_in_order():
    def described(line):
        return line.split(" | ")[:3]

    assert [described(line) for line in in_docs()[2:]] == [described(row(layout, "", "")) for layout in LAYOUTS]
    assert len({row(layout, "", "") for layout in LAYOUTS}) == len(LAYOUTS) > 80


@pytest.mark.sampled(7)
@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_what_happens_to_a_layout_is_what_the_docs_say(index, tmp_path):
    layout = LAYOUTS[index]
    assert row(layout, *outcome(layout, tmp_path / "head")) == in_docs()[2 + index]
