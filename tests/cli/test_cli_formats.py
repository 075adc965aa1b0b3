"""`specheads export` and `specheads import` as a user meets them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from specheads import SpecModel
from tests.reference import foreign
from tests.support.command_line import run, ship
from tests.support.fake_engine import program
from tests.support.openai_server import serving


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A head for a base of 8 layers, on disk."""
    return ship(tmp_path_factory.mktemp("shipped"), num_hidden_layers=8)


def test_a_head_goes_out_and_comes_back(small, tmp_path, capsys):
    code, out, _ = run(capsys, "export", small / "eagle3", tmp_path / "served", "--to", "sglang", "--json")
    record = json.loads(out)
    assert code == 0 and record["files"] == ["README.md", "config.json", "model.safetensors"]
    assert record["form"] == "EAGLE-3 for SGLang" and "SGLang" in record["written_for"]
    code, out, _ = run(capsys, "import", tmp_path / "served", tmp_path / "back", "--base", small / "base", "--json")
    assert code == 0 and json.loads(out)["kind"] == "eagle3"
    one, other = (SpecModel.from_pretrained(folder) for folder in (small / "eagle3", tmp_path / "back"))
    assert all(torch.equal(t, other.head_state_dict()[name]) for name, t in one.head_state_dict().items())


def test_the_form_is_said_once(small, tmp_path, capsys, hf_log):
    run(capsys, "export", small / "medusa", tmp_path / "served", "--to", "vllm")
    hf_log.clear()
    code, out, _ = run(capsys, "import", tmp_path / "served", tmp_path / "back", "--base", small / "base")
    said = [
        r.getMessage() for r in hf_log.records if "holds vLLM Medusa: read as a head of kind medusa" in r.getMessage()
    ]
    assert code == 0 and len(said) == 1 and "kind" in out and "medusa" in out


def test_dtype_and_check(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = ["--to", "vllm", "--dtype", "bfloat16", "--embeddings", "--check", "--json"]
    code, out, _ = run(capsys, "export", small / "eagle3", tmp_path / "served", *options)
    assert code == 0 and json.loads(out)["check"].startswith("transformers ")
    assert json.loads((tmp_path / "served" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_is_certified_by_its_engine(small, tmp_path, capsys):
    """One that writes a token again and again, though its own choice of a single token is the base's: exit code 3, and
    `specheads info` says it too. One that does not start: a line, and the export is there."""
    base = AutoModelForCausalLM.from_pretrained(small / "base")

    def reply(route, body, headers):
        if body["max_tokens"] > 1:
            return 200, {"choices": [{"token_ids": [70] * body["max_tokens"]}]}
        return 200, {"choices": [{"token_ids": [int(base(torch.tensor([body["prompt"]])).logits[0, -1].argmax())]}]}

    export = ("export", small / "eagle3", tmp_path / "served", "--to", "vllm")
    with serving(reply) as url:
        engine = program(tmp_path, url)
        code, out, _ = run(capsys, *export, "--certify", f"vllm={engine}")
    assert code == 3 and "vllm 0.0" in out and "greedy not lossless" in out and "certificate.json" in out
    assert "greedy **not lossless**" in (tmp_path / "served" / "README.md").read_text()
    code, out, _ = run(capsys, "info", tmp_path / "served", "--json")
    assert code == 0 and "greedy not lossless" in json.loads(out)["certificate"][0]
    code, _, err = run(capsys, *export[:2], tmp_path / "other", *export[3:], "--certify", f"vllm={program(tmp_path)}")
    assert code != 0 and "vllm did not start: ValueError: no memory" in err and (tmp_path / "other").is_dir()


def test_an_export_does_not_replace_the_current_directory(small, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here", tmp_path / "here"):
        code, _, err = run(capsys, "export", small / "eagle3", out, "--to", "vllm")
        assert code == 2 and "is the current directory, which the export would replace; name one inside it" in err
    assert run(capsys, "export", small / "eagle3", "inside", "--to", "vllm")[0] == 0


BAD_INPUT = [
    ("export {small}/eagle3 {tmp}/out", "--to"),
    ("export {small}/eagle3 {tmp}/out --to vlm", "did you mean 'vllm'"),
    ("export {small}/eagle3 {small} --to vllm", "is not an empty directory; give a new one"),
    ("export {small}/eagle3 {tmp}/out --to medusa", "no form for a head of kind eagle3; formats that can: eagle,"),
    ("export {small}/eagle3 {tmp}/out --to vllm --certify vlm=python", "did you mean 'vllm'"),
    ("export {small}/eagle3 {tmp}/out --to sglang --certify vllm=python", "with --to vllm or speculators, not sglang"),
    ("export {small}/eagle3 {tmp}/out --to vllm --dtype int8", "--dtype 'int8' is unknown; expected float32"),
    ("export {small}/base {tmp}/out --to vllm", "not the config of a draft head"),
    ("export {small}/eagle3 {tmp}/out --to vllm --base {tmp}/none", "/none"),
    ("import {small}/base {tmp}/out --base {small}/base", "not the config of a draft head"),
    ("import {tmp}/none {tmp}/out", "none "),
    ("import {tmp}/theirs {tmp}/out", "does not name the base it was trained for; give it with --base"),
    (
        "import {tmp}/theirs {tmp}/out --base {small}/base",
        "which can run code; --allow-pickle of `specheads import`",
    ),
    (
        "import {tmp}/theirs {tmp}/out --base {small}/base --allow-pickle",
        "made for another base: vocab_size is 258",
    ),
    (
        "import {tmp}/theirs {tmp}/theirs --base {small}/base --allow-pickle",
        "is not an empty directory; give a new one",
    ),
    (
        "import {tmp}/theirs {tmp}/run --base {small}/base --allow-pickle",
        "run exists and is not an empty directory",
    ),
]


def test_bad_input_is_one_line(small, tmp_path, capsys):
    foreign.eagle3(tmp_path / "theirs", "eagle")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"eval_accepted_length": 3.0}')
    for line, message in BAD_INPUT:
        code, out, err = run(capsys, *(word.format(small=small, tmp=tmp_path) for word in line.split()))
        ours = [text for text in err.splitlines() if text.startswith("specheads: ")]
        assert code == 2 and not out and len(ours) == 1 and message in ours[0], (line, err)
        assert not (tmp_path / "out").exists()
