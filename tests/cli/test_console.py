"""What the terminal shows: tokens in their colours, whole characters, nothing that steers it."""

import io
import itertools
import re
import sys
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from specheads import terminal
from specheads.cli import text
from specheads.cli.chat.console import COLUMNS
from specheads.cli.text_picture import text_svg
from specheads.decoding.drafters.retokenize import TextPieces
from specheads.pictures import DARK, LIGHT

TABLES = {
    "comparison": (COLUMNS, ("head", "96", "178.1", "2.00×", "123/456 (27%)", "2.10", "differs")),
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
    stream = text.TokenStream(screen, Pieces(), colored=True)
    for step in (b"prompt", b"a", b"bcd", b"ef"):
        stream.put(torch.tensor(list(step)))
    stream.end()
    stream.close(accepted=1)
    assert stream.depths == [0, 1, 2, 0, 1, 0]
    styles = text.DEPTH_STYLES
    assert screen.written == [
        ("a", styles[0]), ("b", styles[1]), ("c", styles[2]), ("d", styles[0]), ("e", styles[1]), ("f", styles[0])
    ]  # fmt: skip


def test_the_pace_stands_below_the_text_and_leaves_the_terminal_as_it_was(monkeypatch):
    """A screen of 20 × 6 that knows what the line is made of; text that is longer than the screen scrolls above it."""
    file = io.StringIO()
    console = Console(file=file, width=20, height=6, force_terminal=True)
    with terminal.StatusLine(console) as status:
        stream = text.TokenStream(console, Pieces(), colored=False, status=status)
        for step in (b"prompt", b"a", b"bcd\n"):
            stream.put(torch.tensor(list(step)))
        stream.close(accepted=3)
    shown = file.getvalue()
    assert shown.count("\x1b[1;5r") == 1 and shown.endswith("\x1b7\x1b[r\x1b[6;1H\x1b[2K\x1b8")
    lines = re.findall(r"\x1b7\x1b\[6;1H\x1b\[2K\x1b\[2m(.*?)\x1b\[0m\x1b8", shown)
    assert len(lines) == 2 and all(len(line) < 20 for line in lines)
    assert lines[0].startswith("1 token  ") and lines[1].startswith("5 tokens  ")
    assert re.sub(r"\x1b7.*?\x1b8|\x1b[DM]", "", shown).replace("\x1b[1;5r", "") == "abcd\n"
    for hidden in (Console(file=io.StringIO(), force_terminal=False), Console(file=file, force_terminal=True)):
        with terminal.StatusLine(hidden, shown=hidden.file is not file) as status:
            status.update("x")
    assert file.getvalue() == shown


def test_the_picture_of_a_text_has_each_token_in_the_colour_of_its_depth_and_asks_for_nothing():
    svg = text_svg("x =", list(b"abc<"), [0, 1, 2, 7], 3, Pieces())
    root = ElementTree.fromstring(svg)  # a < of the text is no tag
    style = next(node.text for node in root if node.tag.endswith("style"))
    light, _, dark = style.partition("@media(prefers-color-scheme: dark)")
    for sheet, look in ((light, LIGHT), (dark, DARK)):
        fill = dict(re.findall(r"\.(text-\w+) \{ ?fill: (#[0-9a-f]{6})", sheet))
        words = [(node.text.replace("\xa0", " "), fill[node.attrib["class"]]) for node in root.iter() if node.text
                 and node.tag.endswith("}text") and node.text.strip()]  # fmt: skip
        blue, green, cyan, purple = (look.colors[i] for i in (0, 2, 5, 7))
        assert words[:5] == [("x =", look.soft), ("a", look.ink), ("b", green), ("c", cyan), ("<", purple)]
        assert ("3", blue) in [(text.strip(), color) for text, color in words], "the legend's"
        assert fill["text-page"] == look.page
    assert "4 tokens in 3 passes of the model: 1.33 tokens a pass" in "".join(root.itertext()).replace("\xa0", " ")
    assert not re.search(r"url\((?!#)|@font-face|@import|href", svg) and svg.count("http") == 1


def test_the_prompt_is_shown_with_the_first_token():
    screen = Screen()
    stream = text.TokenStream(screen, Pieces(), colored=True, prompt="x =")
    for step in (b"x =", b"a"):
        stream.put(torch.tensor(list(step)))
    assert not screen.written, "what the log says of the first step comes before it"
    stream.put(torch.tensor(list(b"bc")))
    stream.close(accepted=1)
    assert [text for text, _ in screen.written] == ["x =", "a", "b", "c"]


def test_a_text_that_stops_at_a_draft_ends_in_its_colour():
    stream = text.TokenStream(Screen(), Pieces(), colored=True)
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


def test_a_narrow_terminal_cuts_no_name_and_no_figure():
    for (columns, cells), width in itertools.product(TABLES.values(), (40, 80, 200)):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
        terminal.print_table(console, terminal.table("", columns, [cells, cells]))
        shown = file.getvalue()
        assert "…" not in shown and all(word in shown.split() for cell in (*columns, *cells) for word in cell.split())
        assert width == 40 or max(map(len, shown.splitlines())) <= width
        assert width < 200 or len(shown.splitlines()) == 6
