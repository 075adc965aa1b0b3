"""The Python blocks of README and docs/decoding.md and the example that trains, run from a clone."""

import re

import pytest
import torch

from specheads import SpecModel
from specheads.bench.prompts import held_out_prompts
from specheads.data import corpus
from tests.support.markdown import blocks
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text("utf8")


PYTHON = blocks(README, "python")
DECODING = blocks((ROOT / "docs/decoding.md").read_text("utf8"), "python")
TRAINING = (ROOT / "examples/train_eagle3.py").read_text("utf8")
SMALLER = [  # of the example that trains, a few steps
    ("[:1_200_000]", "[:150_000]"), ("[:256, :32]", "[:32, :32]"), ("[:1000]", "[:16]"), ("256:1256", "256:272"),
    ("steps=25", "steps=2"), ("tokenizer, 8)", "tokenizer, 2)"),
    ('"max_new_tokens": 96, "min_new_tokens": 96', '"max_new_tokens": 96'),
]  # fmt: skip


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that holds what a clone's holds for these blocks."""
    (tmp_path / "checkpoints").symlink_to(corpus.checkpoints_dir())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_blocks_decode_text_worth_reading_in_few_steps(clone, capsys):
    made = {}
    for block in PYTHON:
        exec(block, made)
    out = capsys.readouterr().out
    lookup, head = map(float, re.findall(r"([\d.]+) tokens a step", out))
    assert out.count("def save_config(config, path):") == 2 and head > lookup > 1


def test_the_example_that_trains_runs_and_restores(clone, capsys):
    block = TRAINING
    for written, smaller in SMALLER:
        assert block.count(written) == 1, written
        block = block.replace(written, smaller)
    made = {}
    exec(block, made)
    said = capsys.readouterr()
    assert "accepted length" in said.out + said.err and said.out.endswith(
        "times the speed of transformers' generate()\n"
    )
    restored = SpecModel.from_pretrained("runs/first", dtype="auto")
    assert all(
        torch.equal(tensor, made["model"].head_state_dict()[name])
        for name, tensor in restored.head_state_dict().items()
    )
    assert (clone / "runs/first/README.md").is_file()


@pytest.mark.slow
def test_the_example_that_trains_runs_unchanged_and_its_drafts_are_accepted(clone, capsys):
    made = {}
    exec(TRAINING, made)
    prompts = held_out_prompts(made["tokenizer"], 4)
    lengths = []
    for prompt in prompts:
        inputs = made["tokenizer"](prompt, return_tensors="pt")
        out = made["model"].generate(**inputs, max_new_tokens=64, do_sample=False, return_dict_in_generate=True)
        lengths.append(out.statistics()["accepted_length"])
        assert torch.equal(out.sequences, made["base"].generate(**inputs, max_new_tokens=64, do_sample=False))
    assert sum(lengths) / len(lengths) > 2


def test_the_blocks_of_the_decoding_page_run(clone):
    for block in DECODING:
        exec(block, {})


def test_readme_names_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    commands = re.findall(r"(?:train|recipes|benchmarks|docs|checkpoints|examples)/[\w/.-]*\w", README)
    assert links
    for name in {*links, *commands}:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".ci/run", "docs/LOG.md"])
def test_repository_files_exist(name):
    assert (ROOT / name).is_file()
