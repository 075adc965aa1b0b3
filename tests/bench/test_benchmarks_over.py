"""benchmarks/over.py: all decoders of a run over one of them."""

import json
import sys

import pytest

from benchmarks import over


def record():
    """Two prompt batches of each of two sets, 100 tokens each."""
    rounds = []
    for name, slow in (("a", 2), ("b", 3)):
        for index in range(2):
            seconds = {"plain": 4, "openvino:5:runs/e3": 4 / slow * (1 + index)}
            decoders = {d: {"tokens": [60, 40], "seconds": s} for d, s in seconds.items()}
            rounds.append({"prompts": name, "batch": 1, "temperature": 0.0, "index": index, "decoders": decoders})
    return {"rounds": rounds}


def test_each_cell_is_over_the_same_prompts_of_the_other(tmp_path, monkeypatch, capsys):
    found = over.ratios(record(), "openvino:5:runs/e3")
    assert list(found) == ["plain", "openvino:5:runs/e3"]
    (first, ends), (second, _) = found["plain"].values()
    assert first == pytest.approx(6 / 8) and second == pytest.approx(4 / 8)
    assert ends == pytest.approx((0.5, 1.0))  # two batches: either alone, or both
    assert set(found["openvino:5:runs/e3"].values()) == {(1.0, (1.0, 1.0))}
    (tmp_path / "bench.json").write_text(json.dumps(record()), "utf8")
    monkeypatch.setattr(sys, "argv", ["over.py", str(tmp_path), "openvino:5:runs/e3"])
    assert over.main() == 0
    shown = capsys.readouterr().out
    assert "| over openvino:5:runs/e3 | a, batch 1, T = 0 | b, batch 1, T = 0 |" in shown
    assert "| plain | 0.75× (0.50–1.00) | 0.50× (" in shown


def test_a_decoder_that_is_left_out_of_a_cell_or_midway_is_compared_where_it_ran(tmp_path, monkeypatch, capsys):
    rounds = record()["rounds"]
    for one in rounds:
        if one["prompts"] == "a" or one["index"] == 0:
            one["decoders"]["lookup"] = one["decoders"]["plain"]
        if one["prompts"] == "b":
            one["batch"] = 2
    (tmp_path / "bench.json").write_text(json.dumps({"rounds": rounds}), "utf8")
    for reference, row in (("plain", "| lookup | 1.00× (1.00–1.00) | 1.00× |"), ("lookup", "| plain | 1.00× (")):
        monkeypatch.setattr(sys, "argv", ["over.py", str(tmp_path), reference])
        assert over.main() == 0 and row in capsys.readouterr().out
    del rounds[2]["decoders"]["lookup"]
    assert list(over.ratios({"rounds": rounds}, "plain")["lookup"]) == [("a", 1, 0.0)]
    (tmp_path / "bench.json").write_text(json.dumps({"rounds": rounds[::-1]}), "utf8")
    monkeypatch.setattr(sys, "argv", ["over.py", str(tmp_path), "plain"])
    assert over.main() == 0 and "| lookup | – | 1.00× (1.00–1.00) |" in capsys.readouterr().out


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="no decoder 'openvino'; it has plain, openvino:5:runs/e3"):
        over.ratios(record(), "openvino")
    monkeypatch.setattr(sys, "argv", ["over.py", str(tmp_path), "plain"])
    with pytest.raises(SystemExit):
        over.main()
    assert "bench.json" in capsys.readouterr().err
