"""benchmarks/whole_run.py on a tiny base: each side is trained once, and a cache changes no head."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import whole_run

from tests.support.command_line import ship


def test_each_side_is_trained_once_and_a_cache_changes_no_head(tmp_path, monkeypatch, capsys):
    folder, out = ship(tmp_path / "shipped"), tmp_path / "out"
    monkeypatch.setattr(whole_run, "prompts", lambda tokenizer, count: ["def f(x):", "class A:"])
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
    assert len(files) == 8 and {json.loads(path.read_text())["steps"] for path in files.values()} == {4}
    alone = json.loads((files["specheads-cache-and-anchors-alone-0"].parent / "config.json").read_text())
    assert alone["head"]["anchors"] == 2 and alone["head"]["anchor_first"] is True
    trained = [load_file(files[name].parent / "model.safetensors") for name in ("specheads-1", "specheads-cache-1")]
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    written = {name: path.stat().st_mtime_ns for name, path in files.items()}
    capsys.readouterr()
    (tmp_path / "other.jsonl").write_text("".join(reversed((tmp_path / "own.jsonl").read_text().splitlines(True))))
    for more, other in (
        (["--num-prompts", "2"], "num_prompts: 1, not 2"), (["--max-new-tokens", "9"], "max_new_tokens: 8, not 9"),
        (["--data", str(tmp_path / "other.jsonl")], "data: 4 rows, checksum "),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=f"is of another run .*{other}"):
            whole_run.main([*given, *more])
    assert whole_run.main(given) == 0
    assert {name: path.stat().st_mtime_ns for name, path in files.items()} == written
