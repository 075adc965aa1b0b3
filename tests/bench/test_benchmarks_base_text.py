"""benchmarks/base_text.py: losses and repeated text of base models, with their intervals."""

import json
import sys

import pytest
import torch

from benchmarks import base_text


def test_the_loss_is_that_of_each_token_after_those_before(base):
    ids = [5, 9, 11, 60, 3]
    logits = base(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    summed, count = base_text.nats(base, ids)
    assert count == 4
    assert summed == pytest.approx(-sum(float(logits[i, ids[i + 1]]) for i in range(4)), rel=1e-5)


def test_a_run_has_each_models_figures_side_by_side(shipped, tmp_path, monkeypatch, capsys):
    folder = str(shipped / "base")
    monkeypatch.setattr(base_text, "WINDOW", 40)
    monkeypatch.setattr(base_text, "repeated", lambda ids: [i % 4 == 0 for i in range(len(ids))])
    arguments = [folder, "--share", "0.03", "--max-new-tokens", "12", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["base_text.py", *arguments])
    assert base_text.main() == 0
    table = capsys.readouterr().out
    (found,) = json.loads((tmp_path / "base_text.json").read_text("utf8"))["models"].values()
    assert len(found) == 6 and all(name in table for name in found)
    for name, row in found.items():
        low, high = row["interval"]
        assert low <= row["value"] <= high and f"{row['value']:.3f}" in table
        assert name.startswith("loss") or row["value"] == pytest.approx(0.25, abs=0.05)  # of new tokens alone
