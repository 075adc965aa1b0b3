"""specheads calibrate."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.command_line import run


def test_calibrate_counts_a_tree_and_saves_it_with_the_head(shipped, tmp_path, capsys):
    head = tmp_path / "medusa"
    shutil.copytree(shipped / "medusa", head)
    rows = [{"input_ids": (ids := [7 + i % 50, 8, 9] * 6), "labels": ids} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    ask = ("calibrate", head, "--base", shipped / "base", "--data", data, "--num-nodes", 5)
    before = safetensors.torch.load_file(head / "model.safetensors")
    code, out, _ = run(capsys, *ask, "--save", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["tree"]) <= 4 and found["positions"] > 0
    assert found["accepted_length"] == pytest.approx(found["by_nodes"]["5"])
    lengths = list(found["by_nodes"].values())
    assert lengths == sorted(lengths)
    after = safetensors.torch.load_file(head / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()) and len(before) == len(after)
    _, out, _ = run(capsys, "info", head, "--json")
    assert json.loads(out)["options"]["tree"] == found["tree"]
    code, out, _ = run(capsys, *ask)
    assert code == 0 and "nodes" in out and "saved" not in out
    code, _, err = run(capsys, "calibrate", "some/where", "--data", data, "--save")
    assert code == 2 and "some/where" in err


def test_calibrate_changes_nothing_of_a_saved_head_but_its_tree(shipped, tmp_path, capsys):
    shutil.copytree(shipped / "medusa", head := tmp_path / "heads" / "medusa")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"input_ids": [7, 8, 9] * 6}) + "\n", "utf8")
    stored = json.loads((head / "config.json").read_text("utf8"))
    stored |= {"base_model_name_or_path": "../not/here", "base_revision": "abc"}
    (head / "config.json").write_text(json.dumps(stored), "utf8")
    # another base of the same sizes, under another name
    base = AutoModelForCausalLM.from_pretrained(shipped / "base")
    base.lm_head.weight.data *= 2
    base.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(shipped / "base").save_pretrained(tmp_path / "tuned")
    ask = ("calibrate", head, "--base", tmp_path / "tuned", "--data", data, "--num-nodes", 5)
    code, out, _ = run(capsys, *ask, "--save", "--json")
    stored["head"]["tree"] = json.loads(out)["tree"]
    assert code == 0 and json.loads((head / "config.json").read_text("utf8")) == stored
    with safetensors.safe_open(head / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["specheads_config"]) == stored
