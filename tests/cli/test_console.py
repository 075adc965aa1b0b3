"""What the terminal shows: tokens in their colours, whole characters, nothing that steers it."""

import io
import re
import sys

import pytest
import torch
from rich.console import Console

from specheads import terminal
from specheads.bench import report
from specheads.cli import token_stream
from specheads.cli.chat import view
from specheads.cli.chat.comparison import COLUMNS
from specheads.cli.chat.settings import COMMANDS, Settings
from specheads.cli.chat.steps import Watched
from specheads.decoding.drafters.retokenize import TextPieces
from specheads.decoding.tree import DraftTree

TABLES = {
    "comparison": (COLUMNS, ("head", "96", "178.1", "2.00×", "123/456 (27%)", "2.10", "differs", "the target's")),
    "stopped": (
        COLUMNS,
        ("speculative (stopped)", "128", "1178.1", "12.00×", "1123/1456 (77%)", "12.10", "differs", "lossless"),
    ),
    "evaluate": (report.PART_COLUMNS, ("our loop, no drafts", "123.4", "0.98×", "1.00", "123.4", "0.98×", "1.00")),
}


class Pieces:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf8", errors="replace")


class Screen:
    """A console's stand-in that notes what is written in which style."""

    is_terminal = True

    def __init__(self):
        self.written = []
        self.file = self

    def print(self, text, **kwargs):
        self.written.append((text.plain, str(text.style)))

    def flush(self):
        pass


def test_each_token_is_coloured_by_its_draft_depth():
    screen = Screen()
    stream = token_stream.TokenStream(screen, Pieces(), colored=True)
    for step in (b"prompt", b"a", b"bcd", b"ef"):
        stream.put(torch.tensor(list(step)))
    stream.end()
    stream.close(accepted=1)
    assert stream.depths == [0, 1, 2, 0, 1, 0]
    styles = token_stream.DEPTH_STYLES
    assert screen.written == [
        ("a", styles[0]), ("b", styles[1]), ("c", styles[2]), ("d", styles[0]), ("e", styles[1]), ("f", styles[0])
    ]  # fmt: skip


def test_the_prompt_is_shown_with_the_first_token():
    screen = Screen()
    stream = token_stream.TokenStream(screen, Pieces(), colored=True, prompt="x =")
    for step in (b"x =", b"a"):
        stream.put(torch.tensor(list(step)))
    assert not screen.written, "what the log says of the first step comes before it"
    stream.put(torch.tensor(list(b"bc")))
    stream.close(accepted=1)
    assert [text for text, _ in screen.written] == ["x =", "a", "b", "c"]


def test_a_text_that_stops_at_a_draft_ends_in_its_colour():
    stream = token_stream.TokenStream(Screen(), Pieces(), colored=True)
    for step in (b"prompt", b"a", b"bc"):
        stream.put(torch.tensor(list(step)))
    stream.close(accepted=2)  # both tokens of the last step were drafted: the text stopped before the bonus
    assert stream.depths == [0, 1, 2]


def test_a_character_of_several_tokens_appears_when_it_is_whole():
    pieces = TextPieces(Pieces())
    assert [pieces.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert pieces.add(0xC3) == "" and pieces.add(ord("x")) == "\ufffdx"
    assert pieces.add(0xC3, last=True) == "\ufffd"


def test_what_tokens_would_add_is_seen_without_taking_them_in():
    pieces = TextPieces(Pieces())
    assert pieces.add(*b"ab") == "ab" and pieces.peek(*b"cd") == "cd" and pieces.peek() == ""
    assert pieces.add(ord("e")) == "e"


def test_a_model_cannot_steer_the_terminal():
    assert terminal.printable("a\x1b[31m\x9b\r\x07b\n\tc") == "a\\x1b[31m\\x9b\\r\\x07b\n\tc"


@pytest.mark.parametrize("variable", [None, ("TERM", "dumb"), ("NO_COLOR", "1")])
def test_drafts_are_marked_in_a_terminal_without_colours(variable, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable is not None:
        monkeypatch.setenv(*variable)
    file = io.StringIO()
    file.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", file)
    screen = terminal.make_console()
    stream = view.StepStream(screen, Pieces(), Watched(None))
    for token in b"pa":
        stream.put(torch.tensor([token]))
    stream.watched.tree = DraftTree.chains(torch.tensor(list(b"a")), [list(b"bx")])
    stream.put(torch.tensor(list(b"bc")))
    stream.close(1)
    marked = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert marked == ("abxc" if variable is None else "a{+b+}[-x-]c")
    legend = view.legend("steps", colors=terminal.has_colors(screen)).plain
    assert ("{+accepted" in legend and "[-rejected" in legend) is (variable is not None)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_of_rules_and_matrices_are_shown_as_they_are(is_terminal, monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("COLUMNS", "150")
    name = "fuzzy:tv:0.1 [[5,8],[0,8]] [red]"
    console = terminal.make_console()
    console.print(terminal.table(name, ("name", "b"), [[name, "1"]]))
    with terminal.progress(console, name) as tell:
        tell(1.0, name)
    assert file.getvalue().count(name) >= 3 and "📺" not in file.getvalue()


@pytest.mark.parametrize("width", [80, 110])
def test_the_list_of_commands_cuts_nothing(width):
    file = io.StringIO()
    view.commands(Console(file=file, width=width, force_terminal=True, color_system=None, markup=False), Settings())
    shown = file.getvalue()
    for name, command in COMMANDS.items():
        words = f"/{name} {command.usage} {command.value(Settings())} {command.meaning}".split()
        assert all(word in shown.split() for word in words), name
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("columns", "cells"), TABLES.values(), ids=TABLES)
def test_a_narrow_terminal_cuts_no_name_and_no_figure(width, columns, cells):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
    terminal.print_table(console, terminal.table("", columns, [cells, cells]))
    shown = file.getvalue()
    assert "…" not in shown and all(word in shown.split() for cell in (*columns, *cells) for word in cell.split())
    assert width == 40 or max(map(len, shown.splitlines())) <= width
    assert width < 200 or len(shown.splitlines()) == 6
