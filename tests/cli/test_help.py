"""The help texts: summaries are whole, commands in order, plain names for arguments and values, models that exist."""

import re

import pytest
import typer

import specheads_cli as cli
from specheads_cli.help import ORDER
from tests.support.command_line import run

COMMANDS = typer.main.get_command(cli.app).commands


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_no_summary_is_cut_and_commands_follow_the_work(capsys):
    listed = run(capsys, "--help")[1].partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(ORDER) and set(ORDER) == set(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in listed)


@pytest.mark.parametrize(("command", "usage"), [("train", "RECIPE [KEY=VALUE]..."), ("info", "[PATH]"),
                                                ("tune", "MODEL..."), ("export", "MODEL OUT")])  # fmt: skip
def test_a_usage_line_spells_each_argument_once(command, usage, capsys):
    assert run(capsys, command, "--help")[1].splitlines()[0] == f"Usage: specheads {command} [OPTIONS] {usage}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_has_no_type_of_python_and_no_model_that_a_wheel_lacks(command, capsys):
    text = run(capsys, command, "--help")[1]
    assert not re.search(r"<\w|\[\[[A-Z]|\{[A-Z]|default: \(", text)
    assert "checkpoints/" not in text and all(param.metavar for param in COMMANDS[command].params
                                              if param.param_type_name == "argument")  # fmt: skip


def test_models_of_a_clone_are_named_as_such(capsys):
    assert "a clone of the repository checkpoints/eagle3" in " ".join(run(capsys, "--help")[1].split())
