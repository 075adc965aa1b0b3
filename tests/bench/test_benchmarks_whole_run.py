"""benchmarks/whole_run.py on a tiny base: each side is trained once, and a cache changes no head."""

import importlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command_line import ship
from tests.support.paths import ROOT

MODULES = ("whole_run", "heads", "peers")  # train/ has a heads.py, too, which other tests import


@pytest.fixture
def whole_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("whole_run")
    for name in MODULES:
        sys.modules.pop(name, None)


def test_each_side_is_trained_once_and_a_cache_changes_no_head(whole_run, tmp_path, monkeypatch, capsys):
    folder, out = ship(tmp_path / "shipped"), tmp_path / "out"
    monkeypatch.setattr(whole_run.heads, "prompts", lambda tokenizer, count: ["def f(x):", "class A:"])
    torch.manual_seed(0)
    rows = torch.randint(2, 258, (6, 16)).tolist()
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    given = ["--base", folder / "base", "--data", tmp_path / "own.jsonl", "--out", out, "--seeds", 2, "--num-rows", 4]
    given += ["--epochs", 2, "--batch-size", 2, "--max-length", 16, "--draft-vocab-size", 50, "--num-prompts", 1]
    given = [*map(str, given), "--max-new-tokens", "8"]
    assert whole_run.main(given) == 0
    text = (out / "whole_run.md").read_text()
    assert all(f"| {side} |" in text for side in whole_run.OURS) and "2 epochs of 4 rows" in text
    files = {path.parent.name: path for path in (out / "runs").glob("*/figures.json")}
    assert len(files) == 6 and {json.loads(path.read_text())["steps"] for path in files.values()} == {4}
    trained = [load_file(files[name].parent / "model.safetensors") for name in ("specheads-1", "specheads-cache-1")]
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    written = {name: path.stat().st_mtime_ns for name, path in files.items()}
    capsys.readouterr()
    assert whole_run.main(given) == 0
    assert {name: path.stat().st_mtime_ns for name, path in files.items()} == written
