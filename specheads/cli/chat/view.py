"""What the console shows: streamed texts, coloured drafts, the comparison and the list of commands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specheads import terminal
from specheads.cli import token_stream
from specheads.cli.chat.comparison import COLUMNS, cells, compare_outcomes
from specheads.cli.chat.session import Mode, Outcome
from specheads.cli.chat.settings import COMMANDS, Settings
from specheads.cli.chat.steps import Watched, rejected_path
from specheads.decoding.tree import DraftTree
from specheads.terminal import ACCEPTED, MARKS, OWN, REJECTED


class StepStream(token_stream.TokenStream):
    """Streams accepted drafts, the rejected draft after them, and the target's own token, each in its colour.

    If a tree was drafted, its first path is shown as rejected.
    """

    def __init__(self, console: Console, tokenizer: Any, watched: Watched | None) -> None:
        super().__init__(console, tokenizer, colored=True)
        self.watched = watched
        self.tree: DraftTree | None = None
        self.step: list[int] = []
        self.marked = OWN

    def put(self, value: Any) -> None:
        super().put(value)
        if self.watched is not None:
            self.tree, self.step = self.watched.take(), value.flatten().tolist()

    def _flush(self, depth: int, *, last: bool = False) -> None:
        # If the text stops at a draft, none after it are shown as rejected: they were not judged.
        if self.held is not None and not depth and self.tree is not None:
            text = self.pieces.peek(*rejected_path(self.tree, self.step[:-1]))
            self._write(text.replace("\n", "⏎"), REJECTED)
        super()._flush(depth, last=last)

    def _show(self, token: int, depth: int, *, last: bool = False) -> None:
        self.depths.append(depth)
        self._write(self.pieces.add(token, last=last), ACCEPTED if depth else OWN)

    def close(self, accepted: int) -> None:
        super().close(accepted)
        self._write("", OWN)  # closes an open mark

    def _write(self, text: str, style: str) -> None:
        if not terminal.has_colors(self.console) and style != self.marked and (text or style == OWN):
            text = MARKS[self.marked][1] + MARKS[style][0] + text
            self.marked = style
        terminal.write(self.console, text, style)


def stream(console: Console, mode: Mode, debug: str, watched: Watched | None) -> token_stream.TokenStream:
    """A streamer that prints one decoder's text in the view `debug`."""
    if debug == "steps":
        return StepStream(console, mode.tokenizer, watched)
    return token_stream.TokenStream(console, mode.tokenizer, colored=debug == "depth")


def heading(console: Console, mode: Mode) -> None:
    line = Text(mode.name, style="bold")
    line.append(f"  {terminal.printable(mode.detail)}", style="not bold bright_black")
    console.print(line, soft_wrap=True)


def legend(debug: str, *, colors: bool) -> Text:
    """One line with the meaning of each colour in this view, or of each mark if there are no colours."""
    if debug == "depth":
        return token_stream.legend() if colors else Text("no colours here; drafts are counted after each answer")
    line = Text()
    for text, style in (("accepted drafts", ACCEPTED), ("rejected drafts", REJECTED), ("the target's own", OWN)):
        begin, end = ("", "") if colors else MARKS[style]
        line.append(f"{begin}{text}{end}", style).append("   ")
    return line


def comparison(console: Console, outcomes: Sequence[Outcome], note: str) -> None:
    """Print the figures side by side, and a note that applies to all of them."""
    rows = [cells(name, figures) for name, figures in compare_outcomes(outcomes).items()]
    terminal.print_table(console, terminal.table("", COLUMNS, rows))
    if note:
        console.print(note, style="bright_black")


def commands(console: Console, settings: Settings) -> None:
    """Print every command with its value, and what it does below it, broken between words only."""
    usages = {f"/{name} {command.usage}".rstrip(): command for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    for usage, command in usages.items():
        value = terminal.printable(command.value(settings))
        style = {"on": "green", "off": "red"}.get(value, "cyan")
        line = Text.assemble((usage.ljust(width), "bold"), "  ", (value, style))
        line.rstrip()
        console.print(line, soft_wrap=True)
        for part in textwrap.wrap(command.meaning, console.width - 4, break_long_words=False, break_on_hyphens=False):
            console.print(f"    {part}", style="bright_black", soft_wrap=True)
