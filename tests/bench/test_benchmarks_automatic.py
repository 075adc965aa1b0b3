"""benchmarks/automatic.py: automatic drafts beside the best single decoder of each cell."""

import json
import sys

import pytest

from benchmarks import automatic


def record(**seconds):
    """Rounds of 100 tokens: by decoder, the seconds of each of four prompt batches, two a set."""
    rounds = [
        {
            "prompts": name, "batch": 8, "temperature": 0.8, "index": index,
            "decoders": {d.replace("_", " "): {"tokens": [60, 40], "seconds": s[at]} for d, s in seconds.items()},
        }
        for at, (name, index) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
    ]  # fmt: skip
    return {"command": "specheads bench …", "environment": {}, "rounds": rounds}


SINGLES = {"plain": [4, 4, 4, 4], "lookup": [1, 9, 9, 9], "eagle3": [2, 4, 4, 4]}


def test_automatic_drafts_are_compared_with_the_best_over_all_prompts():
    ((cell, (best, ratio, interval)),) = automatic.compare(record(**SINGLES, eagle3_auto=[2, 4, 4, 18])).items()
    assert cell == ("eagle3", 8, 0.8) and best == "eagle3" and ratio == pytest.approx(14 / 28)
    assert interval[0] < ratio < interval[1] <= 1
    compiled = {f"{name}_compile": values for name, values in SINGLES.items()}
    cells = automatic.compare(record(**SINGLES, **compiled, eagle3_auto_compile=[1, 2, 2, 2]))
    assert cells == {("eagle3 compile", 8, 0.8): ("eagle3 compile", 2.0, (2.0, 2.0))}


def test_a_record_without_what_is_compared_is_refused():
    with pytest.raises(ValueError, match="has no automatic decoder"):
        automatic.compare(record(**SINGLES))
    with pytest.raises(ValueError, match=r"the record lacks \['lookup'\]"):
        automatic.compare(record(plain=[1] * 4, eagle3=[1] * 4, eagle3_auto=[1] * 4))


def test_the_table_is_written_beside_the_record(tmp_path, monkeypatch, capsys):
    found = record(**SINGLES, eagle3_auto=[1, 2, 2, 2]) | {"environment": automatic.environment.environment()}
    (tmp_path / "bench.json").write_text(json.dumps(found), "utf8")
    monkeypatch.setattr(sys, "argv", ["automatic.py", str(tmp_path)])
    assert automatic.main() == 0
    written = (tmp_path / "automatic.md").read_text("utf8")
    assert "| eagle3 | 8 | 0.8 | eagle3 | 2.00× | 2.00–2.00 |" in written and "over 1 cells: 2.00×" in written
    assert str(tmp_path / "automatic.md") in capsys.readouterr().out
