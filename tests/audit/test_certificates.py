"""Claims about certificates: an exported head is run in its engine as its README says, and what was found is written
beside it with hashes that tell later whether it still holds."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specheads import chain
from specheads.audit.base import Base
from specheads.audit.certificates.certificate import CERTIFICATE, certify, lines_of, write
from specheads.audit.certificates.engines import ENGINES, EngineError, Exported, engine_of
from specheads.audit.clients.http import openai_request
from specheads.audit.clients.openvino_server import generation_config
from specheads.audit.settings import Settings
from specheads.audit.watch import AuditConfig
from specheads.models.formats.export.exporting import form_for
from tests.support.fake_engine import program
from tests.support.learnt_heads import PROMPTS, learnt
from tests.support.openai_server import serving

DEPTH = 3
CONFIG = AuditConfig(miss_rate=0.05, tv=0.3, max_tokens=800)
WAYS = (Settings(0.0, max_tokens=24), Settings(1.0, max_tokens=24))


class Engine:
    """This library as an engine with vLLM's counters. temperature: by which it multiplies that asked for; ends: the
    number of requests after which it ends."""

    def __init__(self, model, temperature=1.0, ends=10**9):
        self.model, self.temperature, self.ends = model, temperature, ends
        self.lock, self.by_depth, self.steps = threading.Lock(), [0] * DEPTH, 0

    def reply(self, route, body, headers):
        with self.lock, torch.no_grad():
            self.ends -= 1
            if self.ends < 0:
                return 200, "end"
            ids = torch.tensor([body["prompt"]])
            sampled = {"temperature": body["temperature"] * self.temperature, "top_k": 0, "top_p": 1.0}
            out = self.model.generate(
                ids, max_new_tokens=body["max_tokens"], tree=chain(DEPTH), eos_token_id=None,
                attention_mask=torch.ones_like(ids), return_dict_in_generate=True,
                do_sample=body["temperature"] > 0, **(sampled if body["temperature"] else {}),
            )  # fmt: skip
            for step in out.steps[1:]:
                self.steps += 1
                for i in range(step.accepted[0]):
                    self.by_depth[i] += 1
        return 200, {"choices": [{"token_ids": out.sequences[0, len(body["prompt"]) :].tolist()}]}

    def metrics(self):
        counts = {"drafts": self.steps, "accepted_tokens": sum(self.by_depth)}
        lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {n}.0\n' for name, n in counts.items()]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {n}.0\n'
            for i, n in enumerate(self.by_depth)
        ]
        return "".join(lines)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return learnt("medusa").eval()


@pytest.fixture
def exported(model, tmp_path):
    """The head in vLLM's format, beside its base."""
    model.base.save_pretrained(tmp_path / "base")
    model.config.base_model_name_or_path = str(tmp_path / "base")
    folder = model.export(tmp_path / "served", "vllm")
    commands = form_for(model.config, model.base, model.head, "vllm").serve(str(tmp_path / "base"), str(folder), DEPTH)
    layers = tuple(model.head.layers)
    return Exported(folder, str(tmp_path / "base"), "vllm", "medusa", torch.float32, DEPTH, layers, commands)


@pytest.fixture
def base(model, exported):
    return Base(exported.base, model.base, None, torch.float32, frozenset())


def run(exported, base, tmp_path, server):
    with serving(server.reply, server.metrics) as url:
        engine = engine_of(f"vllm={program(tmp_path, url)} --max-model-len 512")
        engine.refuse(exported)
        found = certify(engine, exported, base, PROMPTS, ways=WAYS, config=CONFIG)
    return found, json.loads((tmp_path / "arguments.json").read_text())


def test_a_right_engine_is_certified_with_what_it_accepts_until_a_file_changes(model, exported, base, tmp_path):
    """The engine is started with the README's own command; the chance of a false alarm is 1e-3."""
    torch.manual_seed(0)
    found, arguments = run(exported, base, tmp_path, Engine(model))
    assert f"--speculative-config '{arguments[arguments.index('--speculative-config') + 1]}'" in exported.commands
    assert arguments[-2:] == ["--max-model-len", "512"]
    assert found["verdict"] == "lossless" and [one["settings"] for one in found["results"]] == [*map(str, WAYS)]
    assert found["versions"] == {"vllm": "0.0", "torch": "0.1", "python": "3"} and found["drafted"] == DEPTH
    server, here = (found["acceptance"][side] for side in ("server", "here"))
    assert server["by_depth"] == here["by_depth"] and here["tokens_per_step"] > 1.2 and found["acceptance"]["equal"]

    record = write(exported, base, [found])
    assert json.loads((exported.folder / CERTIFICATE).read_text()) == json.loads(json.dumps(record))
    assert set(record["head"]) == {"config.json", "model.safetensors"} and record["base"]["digest"]
    (line,) = lines_of(exported.folder)
    assert "vllm 0.0" in line and "greedy lossless, temperature 1 lossless" in line
    assert f"{here['tokens_per_step']:.2f} here" in line
    assert line in (exported.folder / "README.md").read_text()

    config = exported.folder / "config.json"
    config.write_text(config.read_text() + " ")
    weights = tmp_path / "base" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (exported.folder / "model.safetensors").unlink()
    first, *others = lines_of(exported.folder)
    assert others == [line]
    for words in ("config.json has changed", "model.safetensors is missing", "base has changed", "certify"):
        assert words in first
    (exported.folder / CERTIFICATE).write_text('{"certificates": [1]}')
    assert "damaged" in lines_of(exported.folder)[0]
    (exported.folder / CERTIFICATE).unlink()
    assert lines_of(exported.folder) == []


def test_a_wrong_engine_is_certified_as_wrong(model, exported, base, tmp_path):
    torch.manual_seed(0)
    found, _ = run(exported, base, tmp_path, Engine(model, temperature=0.5))
    greedy, sampled = found["results"]
    assert greedy["verdict"] == "lossless" and sampled["verdict"] == found["verdict"] == "not lossless"
    write(exported, base, [found])
    readme = (exported.folder / "README.md").read_text()
    assert "temperature 1 **not lossless**" in readme and "most like this: " in readme
    assert "**" not in lines_of(exported.folder)[0]


def test_an_engine_that_does_not_start_or_ends_is_one_line(model, exported, base, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "specheads.audit.clients.http.time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    )
    engine = engine_of(f"vllm={program(tmp_path)}")
    with pytest.raises(EngineError, match="vllm did not start: ValueError: no memory"):
        certify(engine, exported, base, PROMPTS, ways=WAYS, config=CONFIG)
    with pytest.raises(EngineError, match="vllm ended during the audit: RuntimeError: out of memory"):
        run(exported, base, tmp_path, Engine(model, ends=2))


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads the states of processes from /proc")
def test_an_engine_ends_with_its_owner_however_that_ends(tmp_path):
    """With its own second process, and with the folder of its files."""
    signs = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    folders = [tmp_path / sign.name for sign in signs]
    for folder in folders:
        folder.mkdir()
    worker = Path(__file__).parents[1] / "workers" / "engine_owners.py"
    path = program(tmp_path, "http://127.0.0.1:1/v1")
    subprocess.run([sys.executable, str(worker), str(path), *map(str, folders)], check=True, timeout=600)
    owners = [int(until((folder / "owner").is_file) and (folder / "owner").read_text()) for folder in folders]
    engines = [json.loads(next(folder.glob("*/processes")).read_text()) for folder in folders]
    assert all(len(processes) == 2 and all(map(is_alive, processes)) for processes in engines)
    for owner, sign in zip(owners, signs, strict=True):
        os.kill(owner, sign)
    for folder, processes in zip(folders, engines, strict=True):
        assert until(lambda pids=processes: not any(map(is_alive, pids))), folder.name
        assert until(lambda folder=folder: [path.name for path in folder.iterdir()] == ["owner"]), folder.name


def until(is_true):
    """Wait for it, for up to 300 seconds: of a busy machine."""
    limit = time.monotonic() + 300
    while not (found := is_true()) and time.monotonic() < limit:
        time.sleep(0.05)
    return found


def is_alive(process):
    """A process that has ended, but that nobody has waited for, is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_commands_of_the_other_engines_and_what_they_refuse(exported, tmp_path):
    """llama-server's are those of its README. An EAGLE-3 head's layers are one lower for OpenVINO, as in serving.md."""
    path = program(tmp_path, "http://127.0.0.1:1/v1")
    openvino, llama = (engine_of(f"{name}={path}") for name in ("openvino", "llama.cpp"))
    given = vars(exported) | {
        "engine": "eagle",
        "kind": "eagle3",
        "layers": (2, 6, 9),
        "commands": "openvino_genai.draft_model(",
    }
    assert openvino.command(Exported(**given), 9, tmp_path)[-2:] == [str(DEPTH), "1 5 8"]
    with pytest.raises(ValueError, match="--embeddings"):
        openvino.refuse(Exported(**given))
    openvino.refuse(Exported(**given | {"embeddings": True}))
    with pytest.raises(ValueError, match="does not draft with a head of kind eagle3"):
        openvino.refuse(Exported(**given | {"commands": ""}))
    given = vars(exported) | {"engine": "llamacpp", "commands": "llama-server -m a --spec-type draft-eagle3 --other"}
    command = llama.command(Exported(**given), 9, tmp_path)
    assert command[command.index("--spec-type") + 1] == "draft-eagle3" and f"{exported.folder}/draft.gguf" in command
    assert llama.versions() == {"llama.cpp": "7 (fake)"}
    with pytest.raises(ValueError, match="--gguf"):
        llama.refuse(Exported(**given))
    for engine in (openvino, llama):
        with pytest.raises(ValueError, match="not vllm"):
            engine.refuse(exported)
    assert {*ENGINES} == {"vllm", "openvino", "llama.cpp"}
    dtypes = [engine_of(f"vllm={path} {words}").served(torch.bfloat16, exported) for words in ("", "--dtype float32")]
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("text", "words"),
    [("vlm=python", "did you mean 'vllm'"), ("vllm", "expected NAME=PROGRAM"), ("vllm=/no/python", "is no program")],
)
def test_what_names_no_engine_is_refused(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        engine_of(text)


def test_openvino_is_asked_with_every_sampler():
    genai = SimpleNamespace(GenerationConfig=SimpleNamespace)
    asked = Settings(0.7, top_k=5, top_p=0.9, max_tokens=4, eos=frozenset({2, 3}), stop=("\n",))
    config = generation_config(genai, openai_request([1], asked), 4)
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 5, 0.9)
    assert config.stop_token_ids == {2, 3} and config.stop_strings == {"\n"} and not config.ignore_eos
    greedy = generation_config(genai, openai_request([1], Settings(0.0)), 4)
    assert not greedy.do_sample and greedy.ignore_eos
    with pytest.raises(ValueError, match="no min-p"):
        generation_config(genai, openai_request([1], Settings(min_p=0.1)), 1)
