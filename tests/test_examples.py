"""examples/: each script and the notebook run to their end on tiny models, and are short.

Their own asserts compare texts with those of the model alone. train_eagle3.py: tests/test_readme.py.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from specheads import SpecModel
from tests.support import lm_eval_stand_in
from tests.support.paths import ROOT
from tests.support.two_vocabularies import TARGET

EXAMPLES = ROOT / "examples"


@pytest.fixture
def clone(shipped, tmp_path, monkeypatch):
    """A folder as a clone is, with tiny checkpoints. run: a script with arguments, in this process."""
    (tmp_path / "checkpoints").symlink_to(shipped)
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        scope = {"__name__": "__main__"}
        exec(compile((EXAMPLES / name).read_text("utf8"), name, "exec"), scope)
        return scope

    return run


def test_each_is_short_and_says_how_it_is_run():
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert scripts == ["generate.py", "grpo.py", "lm_harness.py", "medusa_gpt2.py", "serve_vllm.py", "train_eagle3.py"]
    for name in scripts:
        text = (EXAMPLES / name).read_text("utf8")
        assert len(text.splitlines()) <= 60 and f"python examples/{name}" in text.split('"""')[1], name


def test_generate(clone, capsys):
    clone("generate.py")
    assert "tokens a step" in capsys.readouterr().out


def test_a_medusa_head_for_a_gpt2(clone, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(TARGET), **sizes, **ends)).save_pretrained("gpt2")
    TARGET.save_pretrained("gpt2")
    (tmp_path / "text.txt").write_text("def main(x):\n    return x\n" * 120)
    made = clone("medusa_gpt2.py", "text.txt", "gpt2", "out")
    assert float(re.search(r"([\d.]+) tokens a step on rows", capsys.readouterr().out)[1]) >= 1
    assert made["trainer"].state.global_step > 4 and (tmp_path / "out" / "README.md").is_file()
    trained, fresh = made["model"].head.state_dict(), SpecModel.from_pretrained("out", base="gpt2").head.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in trained.items())


def test_serving_in_vllm_as_far_as_the_export(clone, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", None)
    made = clone("serve_vllm.py", "checkpoints/medusa", "served", "--export")
    command = capsys.readouterr().out.strip()
    assert command.startswith("vllm serve ") and str(tmp_path / "served") in command and '"medusa"' in command
    assert json.loads((tmp_path / "served" / "config.json").read_text())["architectures"]
    assert made["command"].count("--speculative-config") == 1


def test_grpo_with_drafted_rollouts(clone, tmp_path, capsys):
    pytest.importorskip("trl", reason="trl is not installed")
    made = clone("grpo.py", 2)
    assert "step 2: reward" in capsys.readouterr().out
    saved = SpecModel.from_pretrained("runs/grpo/head", base="runs/grpo")
    assert made["rollouts"].updater.updates == 1 and saved.head.config == made["rollouts"].head.config


def test_a_drafted_evaluation(clone, monkeypatch, capsys):
    lm_eval_stand_in.install(monkeypatch)
    made = clone("lm_harness.py")
    lm_eval_stand_in.forget()
    assert made["count"]["row_steps"] > 0 and "tokens a step" in capsys.readouterr().out


def test_the_notebook_runs_from_top_to_bottom_and_shows_what_it_printed(clone, capsys):
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text("utf8"))["cells"]
    scope = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
            printed = bool(capsys.readouterr().out)
            assert bool(cell["outputs"]) == printed and cell["execution_count"]
    links = re.findall(r"\]\((\.\./[^)#]+)\)", json.dumps(cells))
    assert links and all((EXAMPLES / link).exists() for link in links), links
