"""What users can mend is one line on stderr, from commands and from the scripts in train/ alike; faults of the code are
not hidden."""

import sys

import pytest

from specheads.cli.errors import report
from specheads.options import OptionError
from specheads.training.distributed.launch import LaunchError
from train import base_model, bigram, features, heads

OUTPUT = ["--output", "out"]
SCRIPTS = {
    heads: ["eagle3"],
    features: ["eagle3", *OUTPUT],
    bigram: ["--base", "base", *OUTPUT],
    base_model: ["--output_dir", "out"],
}
WORK = {
    heads: "specheads.cli.commands.train.train", features: "specheads.cli.commands.features.save",
    bigram: "specheads.hub.hub_options",
    base_model: "specheads.training.base_model.run.train",
}  # fmt: skip


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def ended_by(request, monkeypatch, capsys):
    """Run a script whose work raises this error → its exit code, its name and its lines on stderr."""

    def run(error):
        def fails(*args, **kwargs):
            raise error

        script = request.param
        monkeypatch.setattr(WORK[script], fails)
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *SCRIPTS[script]])
        return script.main(), f"{script.__name__.replace('.', '/')}.py", capsys.readouterr().err.splitlines()

    return run


def test_a_script_ends_in_one_line_if_the_connection_breaks(ended_by):
    client = pytest.importorskip("httpx2")  # the errors of requests, as of older clients of the hub, are OSErrors
    code, program, (line,) = ended_by(client.ReadTimeout("The read operation\ntimed out"))
    assert code == 2
    assert line == f"{program}: the connection to the hub broke (The read operation timed out); start the command again"


def test_ctrl_c_in_a_script_is_one_line(ended_by, monkeypatch):
    code, program, lines = ended_by(KeyboardInterrupt())
    assert (code, lines) == (130, [f"{program}: stopped"])
    monkeypatch.setenv("RANK", "1")  # another process of the same run says it
    assert ended_by(KeyboardInterrupt())[2] == []


def test_an_option_that_a_script_does_not_have_is_one_line(capsys):
    for script, words, message in (
        (heads, "eagle3 --lr 1e-3", "did you mean training.learning_rate=1e-3?"),
        (heads, "eagle3 --dry-rum", "did you mean --dry-run?"),
        (features, "eagle3 --output o --max-lengt=9", "did you mean data.max_length=9?"),
        (bigram, "--base a --output b --sourc=c d", "unrecognized arguments: d"),
        (base_model, "--output_dir a --layrs 3", "did you mean --layers?"),
        (base_model, "--output_dir a --layers many", "invalid int value: 'many'"),
        (heads, "", "the following arguments are required: recipe"),
    ):
        assert script.main(words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{script.__name__.replace('.', '/')}.py: ") and message in line


def test_the_line_says_what_is_wrong(capsys):
    for error, line in (
        (ValueError("two\n  lines"), "two lines"),
        (LaunchError("one process of two"), "one process of two"),
        (FileNotFoundError(2, "No such file or directory", "rows.jsonl"), "No such file or directory: rows.jsonl"),
        (OSError("no such model"), "no such model"),
        (ImportError("install peft"), "install peft"),
        (OptionError("{batch_size} is too large", batch_size=9), "--batch-size 9 is too large"),
    ):
        assert report(error, "program", {"batch_size": "--batch-size"}) == 2
        assert capsys.readouterr().err == f"program: {line}\n"


def test_a_fault_of_the_code_keeps_its_traceback(capsys):
    with pytest.raises(KeyError, match="lost"):
        report(KeyError("lost"), "program")
    assert not capsys.readouterr().err
