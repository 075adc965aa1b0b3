"""What users can mend is one line on stderr, from commands and from the scripts in train/ alike; faults of the code are
not hidden."""

import sys

import pytest

from specheads.options import OptionError
from specheads.training.distributed.launch import LaunchError
from specheads_cli.errors import report
from train import base_model, bigram, features, heads, self_distill

OUTPUT = ["--output", "out"]
SCRIPTS = {
    heads: ["eagle3"],
    features: ["eagle3", *OUTPUT],
    self_distill: ["--base", "base", *OUTPUT],
    bigram: ["--base", "base", *OUTPUT],
    base_model: ["--output_dir", "out"],
}
WORK = {heads: "command.run", features: "run", self_distill: "run", bigram: "hub_options", base_model: "train"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_ends_in_one_line_if_the_connection_breaks(script, monkeypatch, capsys):
    client = pytest.importorskip("httpx2")  # the errors of requests, as of older clients of the hub, are OSErrors

    def breaks(*args, **kwargs):
        raise client.ReadTimeout("The read operation\ntimed out")

    owner, _, name = f"{script.__name__}.{WORK[script]}".rpartition(".")
    monkeypatch.setattr(f"{owner}.{name}", breaks)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *SCRIPTS[script]])
    assert script.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    program = f"{script.__name__.replace('.', '/')}.py"
    assert line == f"{program}: the connection to the hub broke (The read operation timed out); start the command again"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (LaunchError("one process of two"), "one process of two"),
        (FileNotFoundError(2, "No such file or directory", "rows.jsonl"), "No such file or directory: rows.jsonl"),
        (OSError("no such model"), "no such model"),
        (ImportError("install peft"), "install peft"),
        (OptionError("{batch_size} is too large", batch_size=9), "--batch-size 9 is too large"),
    ],
)
def test_the_line_says_what_is_wrong(error, line, capsys):
    assert report(error, "program", {"batch_size": "--batch-size"}) == 2
    assert capsys.readouterr().err == f"program: {line}\n"


def test_a_fault_of_the_code_keeps_its_traceback(capsys):
    with pytest.raises(KeyError, match="lost"):
        report(KeyError("lost"), "program")
    assert not capsys.readouterr().err
