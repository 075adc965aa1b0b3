"""`specheads doctor`: what is missing or too old and how to get it, the machine, and its exit status."""

import ast
import json
import subprocess
import sys
import urllib.error
from importlib import metadata

import pytest
import torch

from specheads.cli.doctor import machine, report
from tests.support.command_line import run
from tests.support.paths import ROOT

SETUP = ROOT / "setup.py"


def setup_argument(name):
    call = next(node for node in ast.walk(ast.parse(SETUP.read_text("utf8"))) if isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "setup")  # fmt: skip
    return ast.literal_eval(next(keyword.value for keyword in call.keywords if keyword.arg == name))


def names(lines):
    return {line.split(">=")[0] for line in lines}


@pytest.fixture
def versions(monkeypatch):
    """Other versions than are installed, by name; None for a package that is missing."""

    def install(**given):
        def version(name, real=metadata.version):
            name = name.replace("-", "_")
            if name in given and given[name] is None:
                raise metadata.PackageNotFoundError(name)
            return given.get(name) or real(name)

        monkeypatch.setattr(report.metadata, "version", version)

    return install


def test_it_knows_every_package_that_setup_asks_for():
    extras = setup_argument("extras_require")
    usual = [*setup_argument("install_requires"), *extras.pop("train"), *extras.pop("cli")]
    assert set(report.REQUIRED) == names(usual)
    asked = set().union(*(names(lines) for extra, lines in extras.items() if extra not in ("dev", "docs")))
    assert asked <= set(report.OPTIONAL)
    least = report._least()
    for line in setup_argument("install_requires"):
        assert least[line.split(">=")[0]] == (line.split(">=")[1], None)


def test_a_usable_machine_is_described_and_passes(capsys, monkeypatch):
    monkeypatch.setattr(machine, "_hub", lambda endpoint: pytest.fail("the network was asked"))
    code, out, _ = run(capsys, "doctor", "--json")
    record = json.loads(out)
    assert code == 0 and record["problems"] == []
    assert record["heads"] == ["medusa", "hydra", "eagle", "eagle3", "mtp", "parallel"]
    assert record["torch"] == torch.__version__ and record["cores"] >= 1 and "base" in record["shipped_checkpoints"]
    here = {entry["name"]: entry for entry in record["required"] + record["optional"]}
    assert here["torch"]["version"] == metadata.version("torch") and here["torch"]["ok"]
    assert here["deepspeed"]["install"] == "pip install 'specheads[deepspeed]'"
    assert "g++" in record["compiler"] or "none of" in record["compiler"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and out.splitlines()[-1].startswith("usable") and "threads" in out


def test_what_is_missing_or_too_old_fails_with_the_command_that_gets_it(versions, capsys):
    for given, problem in (
        ({"transformers": "5.2.1"}, "transformers 5.2.1 is older than 5.17: pip install 'transformers>=5.17'"),
        ({"transformers": None}, "transformers is not installed: pip install 'transformers>=5.17'"),
    ):
        versions(**given)
        code, out, _ = run(capsys, "doctor")
        assert code == 1 and out.splitlines()[-1] == f"not usable: {problem}"
    assert json.loads(run(capsys, "doctor", "--json")[1])["problems"] == [problem]


def test_what_is_optional_may_be_missing_or_too_old(versions, capsys):
    versions(matplotlib=None, xgrammar=None, deepspeed="0.1")
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "pip install 'specheads[plots]'" in out and "pip install 'xgrammar'" in out
    assert "0.1, older than 0.18" in out


def test_versions_compare_by_number():
    for version, least, ok in (
        ("2.11.0+cpu", "2.11", True), ("2.9", "2.11", False), ("2.11", "2.11.0", True), ("3.0.0.dev1", "2.11", True),
    ):  # fmt: skip
        assert report.Package("a", "", version, least, "a").ok is ok


def test_it_answers_where_specheads_itself_cannot_be_imported():
    script = (
        "import sys; sys.modules['transformers'] = None; from specheads.cli import program; "
        "sys.exit(program.run(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not usable: specheads does not load: import of transformers" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_hub_is_asked_if_it_is_asked_for_and_may_be_out_of_reach(capsys, monkeypatch):
    def unreachable(request, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(machine.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", False)
    code, out, _ = run(capsys, "doctor", "--network", "--json")
    assert code == 0 and "cannot be reached" in json.loads(out)["hub"] and "no route" in json.loads(out)["hub"]
    monkeypatch.setattr(machine.constants, "HF_HUB_OFFLINE", True)
    assert "not asked" in json.loads(run(capsys, "doctor", "--network", "--json")[1])["hub"]


def test_memory_is_counted_in_the_dtype_that_auto_loads(monkeypatch, capsys):
    for fast, memory, auto in (
        (False, "8B parameters takes 32 GB in float32", "float32, since there is no GPU; --dtype bfloat16"),
        (True, "8B parameters takes 16 GB in bfloat16", "the checkpoint's bfloat16 for a base of at least 100M"),
    ):
        monkeypatch.setattr(machine, "placement", lambda dtype, device: (None, torch.device("cpu")))
        monkeypatch.setattr(machine, "bfloat16_is_fast", lambda device, fast=fast: fast)
        record = json.loads(run(capsys, "doctor", "--json")[1])
        assert memory in record["memory"] and record["dtype_auto"].startswith(auto)


def test_the_lines_on_speed_say_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "bfloat16_is_fast", lambda device: False)
    assert "training.bf16=false" in machine._bfloat16()
    assert "OMP_NUM_THREADS=2" in machine._threads({"torch_threads": 8, "cores": 2, "load_average": 0.0})
    assert "other programs" in machine._threads({"torch_threads": 2, "cores": 2, "load_average": 6.0})
    assert machine._threads({"torch_threads": 2, "cores": 2, "load_average": 1.0}) == "2 on 2 cores"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert machine._compiler().startswith("none of no-such-compiler, so torch.compile fails")


def test_long_values_continue_below_themselves_in_a_terminal_and_are_one_line_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    record = report.examine(network=False)
    report.show(record)
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    report.show(record)
    shown = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 60 >= max(map(len, shown.splitlines()))
    assert shown.split() == piped.split() and len(shown.splitlines()) > len(piped.splitlines())
    continued = [line for line in shown.splitlines() if line.startswith(" " * 23)]
    assert all(len(line) - len(line.lstrip()) in (23, 34) for line in continued) and continued
