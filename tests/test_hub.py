"""Names on the hub: heads, bases and data are found under them, by revision too, and a name that is none fails at once.

The cache is a real one, laid out in a temporary folder as huggingface_hub lays it out, read in a process of its own.
"""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from specheads import DataConfig, build_datasets, convert, hub, load_head
from specheads.data import datasets as data
from specheads.models.named import Models
from tests.support.command_line import run, ship
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama

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
    given = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
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
    # Of two commits in the cache, which one a model in memory came from is recorded by some versions of transformers
    # alone; of one it is plain.
    assert found["load_head"] in [["SpecModel", 2, known, "org/base", first] for known in (None, FIRST)]
    assert found["convert"] == SECOND
    assert found["theirs"][:4] == ["SpecModel", 3, SECOND, "org/alone"]  # in vLLM's form
    # The base was asked for at the commit that the head was trained for; named by hand it is its newest.
    assert "was trained for another base" in found["base's main"] and "hidden_size is 48" in found["base's main"]


def tiny_llama_of(home):
    return type(tiny_llama()).from_pretrained(home / "hub" / "models--org--base" / "snapshots" / FIRST)


@pytest.mark.slow
def test_the_program_takes_a_hub_id(home):
    """Its tokenizer comes from the base's main branch, as everywhere in transformers."""
    (main,) = [p for p in (home / "hub" / "models--org--base" / "snapshots").iterdir() if p.name == SECOND]
    for path in (home / "hub" / "models--org--base" / "snapshots" / FIRST).glob("tokenizer*"):
        (main / path.name).write_bytes(path.read_bytes())
    ask = ["generate", "org/head", "--prompt", "def f(", "--max-new-tokens", "6", "--json"]
    made = json.loads(in_cache(home, "-m", "specheads", *ask))
    assert made["base"] == "org/base" and made["statistics"]["lossless"] and len(made["token_ids"]) == 6


@pytest.fixture
def no_waiting(monkeypatch, tmp_path):
    """Online, as far as anyone knows, with an empty cache, in a folder that holds models/base; whoever sleeps fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_answers", {})
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))


@pytest.fixture
def server(no_waiting, monkeypatch):
    """A hub that has org/there alone. asked: the paths it was asked for; before: what it does before each answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found.asked.append(self.path)
            found.before()
            there = self.path.endswith("org/there")
            self.send_response(200 if there else 404)
            self.send_header("X-Error-Code", "" if there else "RepoNotFound")
            self.end_headers()
            self.wfile.write(json.dumps({"id": "org/there"}).encode() if there else b"")

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        found = SimpleNamespace(asked=[], before=lambda: None)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{made.server_port}")
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield found
        made.shutdown()


@pytest.fixture
def no_network(no_waiting, monkeypatch):
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *args, **kwargs: (_ for _ in ()).throw(socket.gaierror("no network"))
    )


COMMANDS = {
    "generate": ["generate", "{}", "--prompt", "a"],
    "base": ["chat", "{}"],
    "calibrate": ["calibrate", "{}", "--data", "rows.jsonl"],
    "train": ["train", "recipe.yaml", "base={}"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere"),
        ("a/b/c", "a/b/c"),
        ("./runs", "runs"),
        ("runs/eagle3", "no such folder: runs/eagle3, and the hub cannot be asked for it (no network)"),
        ("models/bas", "no such folder: models/bas (did you mean models/base?)"),
        ("model/base", "no such folder: model/base (did you mean models/base?), and the hub cannot be asked"),
    ],
)
def test_a_name_that_is_nothing_fails_at_once_where_there_is_no_network(name, message, command, capsys, no_network):
    """The hub's client would try six times, and wait in between."""
    Path("recipe.yaml").write_text(
        "{head: {kind: medusa}, data: {train: rows.jsonl}, training: {output_dir: out, use_cpu: true}}"
    )
    code, out, err = run(capsys, *(word.format(name) for word in COMMANDS[command]))
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_connection_that_breaks_in_a_download_is_one_line(capsys, server, monkeypatch):
    client = pytest.importorskip("httpx2")  # the errors of requests, as of older clients of the hub, are OSErrors

    def breaks(*args, **options):
        raise client.RemoteProtocolError("peer closed connection")

    monkeypatch.setattr("specheads.models.formats.files.cached_file", breaks)
    code, out, err = run(capsys, "generate", "org/there", "--prompt", "a")
    assert (code, out) == (2, "") and err == (
        "specheads: the connection to the hub broke (peer closed connection); start the command again\n"
    )


def test_the_hub_is_asked_once_for_a_name_whatever_is_loaded_of_it(capsys, server):
    code, _, err = run(capsys, "generate", "org/nosuch", "--prompt", "a")
    assert code == 2 and err == (
        "specheads: no such folder: org/nosuch, and the hub has no model of that name; a private one needs "
        "`hf auth login`\n"
    )
    assert [path for path in server.asked if "org/nosuch" in path] == ["/api/models/org/nosuch"]


def test_the_hub_is_not_asked_for_paths(server):
    for name in ("models/bas", "./model", "~/models", "a/b/c", "/nowhere/at/all", "models--x", "x.jsonl/"):
        with pytest.raises(FileNotFoundError, match=r"^no such folder: "):
            hub.hub_options(name)
    assert hub.hub_options("models/base") == hub.hub_options(Path("models/base")) == {}
    assert server.asked == []


def test_what_the_hub_has_is_loaded_from_there_and_what_was_downloaded_from_here(server, tmp_path, monkeypatch):
    assert hub.hub_options("org/there") == {}
    (tmp_path / "cache" / "models--org--kept" / "snapshots").mkdir(parents=True)
    assert hub.hub_options("org/kept") == {"local_files_only": True}  # the hub has it no longer
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert hub.hub_options("org/kept") == {"local_files_only": True}
    before = list(server.asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.hub_options("org/kept") == {"local_files_only": True}
    with pytest.raises(FileNotFoundError, match=r"no such folder: other/name, .* \(HF_HUB_OFFLINE is set\)"):
        hub.hub_options("other/name")
    assert server.asked == before


def test_it_says_that_it_asks_the_hub_where_that_takes_long(server, capsys):
    assert hub.hub_options("org/there") == {}
    assert capsys.readouterr().err == ""
    told = threading.Event()
    server.before = lambda: told.wait(5)

    def release():
        while "asking http://127.0.0.1" not in (said := capsys.readouterr().err):
            threading.Event().wait(0.05)
        needs_teacher.append(said)
        told.set()

    needs_teacher = []
    listener = threading.Thread(target=release)
    listener.start()
    with pytest.raises(FileNotFoundError, match=r"the hub has no dataset of that name"):
        hub.hub_options("org/slow", "dataset")
    listener.join(5)
    assert needs_teacher and "for org/slow …" in needs_teacher[0]


@pytest.mark.parametrize("command", ["generate {} --prompt a", "chat {}", "tune {}", "info {}",
                                     "export {} out --to vllm", "parity {} --data a.jsonl", "bench . -d {}",
                                     "bench {}"])  # fmt: skip
def test_the_name_alone_of_a_shipped_head_is_answered_with_its_path(command, capsys, no_network):
    code, out, err = run(capsys, *command.format("egle3").split())
    assert (code, out) == (2, "") and f"(did you mean {ROOT / 'checkpoints' / 'eagle3'}?)" in err


def test_a_drafter_that_is_nothing_is_told_with_the_names_there_are(no_network):
    models = Models(None, None)
    with pytest.raises(
        FileNotFoundError, match=r"no such folder: nonsense, .*; without a checkpoint: auto, head, model, lookup"
    ):
        models.drafter("nonsense")


# --- Data ---


def test_data_is_loaded_by_hub_id_subset_and_split(monkeypatch, shipped):
    from transformers import AutoTokenizer

    asked = []

    def load_dataset(name, subset=None, *, split=None):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{"text": f"def {split}(x): return x"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_ask", lambda *name: (hub.THERE, ""))
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
