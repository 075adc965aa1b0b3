"""What the commands show people: tables with units, numbers that end below one another, and a line on each column."""

import re

from specheads.cli.commands import info
from specheads.data import corpus
from specheads.training.parity import Parity


def test_parity_says_in_words_whether_it_holds():
    assert "agree: 1.00% apart over 50 steps, and 2.00% passes" in Parity(2.02, 2.0, 2.5, 50, 0.02).verdict
    assert "DIFFER: 50.00% apart" in Parity(3.0, 2.0, 2.5, 50, 0.02).verdict


def test_info_gives_units_and_a_line_for_each_option(capsys):
    info.show(info.checkpoint_record(corpus.checkpoints_dir() / "eagle3"))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"parameters +1,590,272", next(line for line in lines if line.startswith("parameters")))
    assert any(re.fullmatch(r"size \(MB\) +\d+\.\d\d", line) for line in lines)
    assert any(re.fullmatch(r"  draft_depth +7", line) for line in lines)
