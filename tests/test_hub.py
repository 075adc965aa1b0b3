"""Names on the hub: heads, bases and data are found under them, by revision too, and a name that is none fails at once.

The cache is a real one, laid out in a temporary folder as huggingface_hub lays it out, read in a process of its own.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from program import run, ship

from specheads import DataConfig, build_datasets, convert, data, load_head
from tests.conftest import tiny_llama

FIRST, SECOND = "1" * 40, "2" * 40


def snapshot(home, name, commit, *refs):
    """The folder of one commit of org/name in the cache `home`, to which the refs point."""
    repository = home / "hub" / f"models--org--{name}"
    for ref in refs:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache with org/base, and with org/head in two revisions, trained for the first commit of that base."""
    made, home = ship(tmp_path_factory.mktemp("made")), tmp_path_factory.mktemp("home")
    base, alone = snapshot(home, "base", FIRST, "old"), snapshot(home, "alone", SECOND, "main")
    for path in (made / "base").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
        (alone / path.name).write_bytes(path.read_bytes())
    other = snapshot(home, "base", SECOND, "main")
    tiny_llama(hidden_size=48, num_hidden_layers=2).save_pretrained(other)  # no head fits it
    loaded = type(tiny_llama()).from_pretrained(base)
    loaded.name_or_path, loaded.config._commit_hash = "org/base", FIRST
    for commit, ref, heads in ((FIRST, "main", 2), (SECOND, "v2", 3)):
        torch.manual_seed(heads)
        convert(loaded, "medusa", num_heads=heads).save_pretrained(snapshot(home, "head", commit, ref))
    convert(loaded, "medusa", num_heads=3).export(snapshot(home, "theirs", FIRST, "main"), "vllm")
    return home


SCRIPT = """
import json, sys, torch
import specheads
from transformers import AutoModelForCausalLM
ids = torch.tensor([[5, 6, 7]])
def told(model):
    out = model.generate(ids, do_sample=False, max_new_tokens=8)
    assert torch.equal(out, model.base.generate(ids, do_sample=False, max_new_tokens=8))
    return [type(model).__name__, model.head.config.num_heads, model.config.base_revision, model.base.name_or_path,
            float(sum(p.double().sum() for p in model.head.parameters()))]
old = AutoModelForCausalLM.from_pretrained("org/base", revision="old")
def refused():
    try:
        specheads.SpecModel.from_pretrained("org/head", base="org/base")
    except specheads.CheckpointError as error:
        return str(error)
json.dump({
    "SpecModel": told(specheads.SpecModel.from_pretrained("org/head")),
    "AutoModel": told(AutoModelForCausalLM.from_pretrained("org/head")),
    "revision": told(specheads.SpecModel.from_pretrained("org/head", revision="v2")),
    "commit": told(AutoModelForCausalLM.from_pretrained("org/head", revision="2" * 40)),
    "load_head": told(specheads.load_head(old, "org/head")),
    "base's main": refused(),
    "theirs": told(specheads.SpecModel.from_pretrained("org/theirs", base="org/alone")),
    "convert": specheads.convert("org/alone", "medusa").config.base_revision,
}, sys.stdout)
"""


def in_cache(home, *arguments):
    """stdout of Python over that cache, without a network."""
    given = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    variables = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE")} | given
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_heads_and_their_bases_are_found_by_hub_id_and_revision(home):
    found = json.loads(in_cache(home, "-c", SCRIPT))
    first, second = (
        float(sum(p.double().sum() for p in load_head(tiny_llama_of(home), folder).head.parameters()))
        for folder in (home / "hub" / "models--org--head" / "snapshots" / commit for commit in (FIRST, SECOND))
    )
    assert found["SpecModel"] == found["AutoModel"] == ["SpecModel", 2, FIRST, "org/base", first]
    assert found["revision"] == found["commit"] == ["SpecModel", 3, FIRST, "org/base", second]
    # Of two commits in the cache, which one a model in memory came from is recorded nowhere; of one it is plain.
    assert found["load_head"] == ["SpecModel", 2, None, "org/base", first] and found["convert"] == SECOND
    assert found["theirs"][:4] == ["SpecModel", 3, SECOND, "org/alone"]  # in vLLM's form
    # The base was asked for at the commit that the head was trained for; named by hand it is its newest.
    assert "was trained for another base" in found["base's main"] and "hidden_size is 48" in found["base's main"]


def tiny_llama_of(home):
    return type(tiny_llama()).from_pretrained(home / "hub" / "models--org--base" / "snapshots" / FIRST)


def test_the_program_takes_a_hub_id(home):
    """Its tokenizer comes from the base's main branch, as everywhere in transformers."""
    (main,) = [p for p in (home / "hub" / "models--org--base" / "snapshots").iterdir() if p.name == SECOND]
    for path in (home / "hub" / "models--org--base" / "snapshots" / FIRST).glob("tokenizer*"):
        (main / path.name).write_bytes(path.read_bytes())
    ask = ["generate", "org/head", "--prompt", "def f(", "--max-new-tokens", "6", "--json"]
    made = json.loads(in_cache(home, "-m", "specheads_cli", *ask))
    assert made["base"] == "org/base" and made["statistics"]["lossless"] and len(made["token_ids"]) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere is not a directory with config.json and model.safetensors, nor a hub id (owner/name)"),
        ("a/b/c", "a/b/c is not a directory"),
        ("./runs", "is not a directory"),
        ("runs/eagle3", "runs/eagle3 is neither a directory nor a hub repository with config.json"),
    ],
)
def test_a_name_that_is_nothing_fails_at_once_where_there_is_no_network(name, message, capsys, monkeypatch, tmp_path):
    """The hub's client would try six times, and wait in between."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *args, **kwargs: (_ for _ in ()).throw(socket.gaierror("no name"))
    )
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    code, out, err = run(capsys, "generate", name, "--prompt", "a")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


# --- Data ---


def test_data_is_loaded_by_hub_id_subset_and_split(monkeypatch, shipped):
    from transformers import AutoTokenizer

    asked = []

    def load_dataset(name, subset=None, *, split=None):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{"text": f"def {split}(x): return x"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tokenizer = AutoTokenizer.from_pretrained(shipped / "base")
    config = DataConfig(
        train="org/rows", eval="org/others", subset="python", split="train[:3]", eval_split="validation"
    )
    train, evaluation = build_datasets(config, tokenizer)
    assert asked == [("org/rows", "python", "train[:3]"), ("org/others", "python", "validation")]
    assert len(train) == len(evaluation) == 3
    assert tokenizer.decode(evaluation[0]["input_ids"][:3]) == "def"
    data.load_dataset_rows("single_name")
    assert asked[-1] == ("single_name", None, "train")
