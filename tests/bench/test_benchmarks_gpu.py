"""benchmarks/gpu.py in tiny sizes: what it writes, and that wrong texts, failures and time limits show."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu
from gpu_sections import attention, correctness, nodes, trained
from gpu_sections.sizes import SIZES
from gpu_sections.timing import Deadline

from specheads.decoding.verify.cache import BUCKET


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The exit code, the record and the text of a whole run."""
    out = tmp_path_factory.mktemp("gpu")
    code = gpu.main(["--toy", "--out", str(out)])
    return code, json.loads((out / "gpu.json").read_text()), (out / "gpu.md").read_text()


@pytest.mark.slow
def test_a_run_has_every_section_and_nothing_is_wrong(toy):
    code, record, text = toy
    assert list(record["sections"]) == ["correctness", "nodes", "speed", "context", "attention"]
    assert code == 0 and record["warnings"] == []
    assert not any(section["skipped"] or "error" in section for section in record["sections"].values())
    assert {line[-1] for line in record["sections"]["correctness"]["lines"]} == {"yes"}
    assert record["command"] in text and record["environment"]["torch"] in text
    assert all(f"## {section['title']}" in text for section in record["sections"].values())


@pytest.mark.slow
def test_a_step_gains_as_many_tokens_as_are_forced(toy):
    rows = {row["decoder"]: row for row in toy[1]["sections"]["speed"]["rows"]}
    compiled = [f"{name}, compiled" for name in ("plain", *(f"{n} a step" for n in range(1, 5)))]
    for name in ("plain", "4 a step", *compiled):
        assert rows[name]["same_text"] == rows[name]["texts"]
        assert round(rows[name]["accepted_length"]) == (1 if name.startswith("plain") else int(name[0]))
    assert rows["4 a step, compiled"]["shares"]["step"] > 0 == rows["4 a step"]["shares"]["step"]


@pytest.mark.slow
def test_each_cell_is_timed_and_reads_what_it_should(toy):
    sections, sizes = toy[1]["sections"], SIZES["toy"]
    steps = sizes.rounds * sizes.steps
    assert [row["nodes"] for row in sections["nodes"]["rows"]] == list(sizes.nodes)
    assert [row["compiled_step"] is not None for row in sections["nodes"]["rows"]] == [False, False, True, False]
    for row in sections["nodes"]["rows"]:
        assert row["verify"]["count"] == steps and row["verify"]["ms"] < row["step"]["ms"]
    for row in sections["context"]["rows"]:
        slots = row["state_bytes"] / (2 * sizes.layers * sizes.key_heads * sizes.head_dim * 4)
        assert row["length"] + row["nodes"] <= slots <= row["length"] + row["nodes"] + 2 * BUCKET
        assert row["step"]["count"] == row["copied"]["count"] == steps
    long = sections["context"]["rows"][-1]
    assert long["nodes"] == 8 and long["peak_bytes_copied"] > long["peak_bytes"]


def test_a_failure_keeps_the_other_sections_and_a_wrong_text_ends_in_1(tmp_path, monkeypatch, capsys):
    def wrong(sizes, device, deadline):
        return {"lines": [["greedy", "generate", "0 of 4 texts", "NO"]], "right": False}

    def broken(machine, deadline):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(correctness, "measure", wrong)
    monkeypatch.setitem(gpu.SECTIONS, "nodes", (broken, *gpu.SECTIONS["nodes"][1:]))
    for only in (["correctness"], ["nodes", "correctness"]):
        assert gpu.main(["--toy", "--out", str(tmp_path), "--only", *only]) == 1
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["sections"]["nodes"]["error"] == "RuntimeError: out of luck"
    assert record["sections"]["correctness"]["right"] is False
    assert "**Failed:** RuntimeError: out of luck" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("cell", SIZES["toy"].attention)
def test_attention_is_timed_beside_float64(cell):
    sizes = SIZES["toy"]
    row = attention.measure_cell(gpu.Machine(sizes, torch.device("cpu")), *cell)
    assert 0 < row["errors"]["torch"] < 1e-6
    assert row["times"]["torch"]["count"] == sizes.rounds * sizes.steps
    assert list(row["times"]) == ["torch"]  # the keys are split on a GPU alone
    line = attention.line_of({**row, "times": {**row["times"], "split": {"ms": 0.5, "interval_ms": [0.25, 0.75]}}})
    assert line[:3] == [str(number) for number in cell] and line[6] == "500 (250–750)"


def test_a_section_whose_time_is_over_says_what_it_skipped():
    machine = gpu.Machine(SIZES["toy"], torch.device("cpu"))
    deadline = Deadline(0.0)
    assert nodes.measure(machine, deadline)["rows"] == []
    assert deadline.skipped == [f"{n} nodes" for n in SIZES["toy"].nodes]


def test_a_greedy_text_that_is_not_the_bases_is_noticed(monkeypatch):
    real = correctness.specheads.generate

    def changed(base, **options):
        out = real(base, **options)
        if options["draft"] == "lookup":
            out.sequences[1, -1] += 1
        return out

    monkeypatch.setattr(correctness.specheads, "generate", changed)
    found = correctness.greedy(SIZES["toy"], torch.device("cpu"), Deadline(1e9), backend=None)
    lines = {line[0]: line for line in found}
    assert lines["greedy, lookup"][-2:] == ["3 of 4 texts, 1.00 tokens a step", "NO"]
    assert lines["greedy, plain"][-1] == "yes"


def test_the_g_test_is_calibrated_and_sees_a_small_difference():
    """At 5 % of 200 right samples; a false alarm of this test has a probability below 1e-4."""
    coin = torch.Generator().manual_seed(0)
    probs = torch.rand(64, generator=coin, dtype=torch.float64).add(0.2)
    probs /= probs.sum()
    draws = torch.multinomial(probs.expand(200, -1), 5000, replacement=True, generator=coin)
    found = [correctness.g_test(torch.bincount(row, minlength=64).double(), probs) for row in draws]
    assert 1 <= sum(p < 0.05 for p in found) <= 24
    other = probs * torch.where(torch.arange(64) % 2 == 0, 1.15, 0.85)
    assert max(correctness.g_test(torch.bincount(row, minlength=64).double(), other) for row in draws) < 1e-3


def test_a_trained_head_is_timed_with_its_own_base_and_writes_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "DECODERS", ("transformers", "plain", "head tree=chain:3", "head auto"))
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"text": f"def area_{n}(width, height):\n"}) + "\n" for n in range(3)))
    head, device = str(Path(__file__).resolve().parents[2] / "checkpoints" / "eagle3"), torch.device("cpu")
    deadline = Deadline(3600)
    section = trained.measure(head, None, file, device, deadline, count=2, new=12, repeats=1)
    rows = {row["decoder"]: row for row in section["rows"]}
    assert list(rows) == list(trained.DECODERS) and not deadline.skipped
    assert all(row["same_text"] == row["texts"] == 2 for row in rows.values())
    assert rows["plain"]["accepted_length"] == 1 < rows["head tree=chain:3"]["accepted_length"]
    assert section["base"].endswith("base") and section["floor"]["weight_bytes"] > 30e6


def test_what_belongs_to_a_head_is_refused_without_one(tmp_path, capsys):
    for words in (["--base", "org/model"], ["--prompts", "questions.jsonl"], ["--only", "trained"]):
        with pytest.raises(SystemExit):
            gpu.main([*words, "--toy", "--out", str(tmp_path)])
        assert "go with --head" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
