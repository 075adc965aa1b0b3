"""Text, tables and progress on a terminal; plain text without one."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# Styles of drafted tokens and the target's own. Without colours, they are marked as in a word diff.
ACCEPTED, REJECTED, OWN = "green", "red strike", "blue"
MARKS = {ACCEPTED: ("{+", "+}"), REJECTED: ("[-", "-]"), OWN: ("", "")}
_LOG_WIDTH = 110  # characters; of tables and rules in a log file
LOG_EVERY = 15.0  # seconds between progress lines in a log file

Report = Callable[[float, str], None]


def make_console(*, stderr: bool = False) -> Console:
    """A console on the current stdout or stderr. If that is not a terminal, it writes no control characters."""
    file = sys.stderr if stderr else sys.stdout
    terminal = file.isatty()
    return Console(
        file=file,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else _LOG_WIDTH,
        highlight=False,
        # Text is text: a rule `fuzzy:tv:0.1` is no television, and a k-matrix [[5, 8], …] no style.
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def has_colors(console: Console) -> bool:
    """Whether styles are visible on the console: not without a terminal, with TERM=dumb or with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def utf8_text(text: str, source: str) -> str:
    """Text that was typed or piped in. ValueError if it was not UTF-8: Python decodes such bytes to surrogates."""
    try:
        return text.encode("utf8", "surrogateescape").decode("utf8")
    except UnicodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


def printable(text: str) -> str:
    """The text with control characters other than newline and tab escaped, so that a model's output cannot control the
    terminal."""
    shown = (c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else repr(c)[1:-1] for c in text)
    return "".join(shown)


def write(console: Console, text: str, style: str = "") -> None:
    """Print text without a line end: styled and `printable` on a terminal, verbatim elsewhere."""
    if console.is_terminal:
        console.print(Text(printable(text), style=style), end="", soft_wrap=True)
    else:
        console.file.write(text)
    console.file.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """A table whose first `left` columns are left-aligned, the others right-aligned. If there is too little space,
    names of columns and left-aligned cells wrap between words."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    rows = list(rows)
    for i, name in enumerate(columns):
        cells = [row[i] for row in rows]
        words = [*name.split(), *(cells if i >= left else " ".join(cells).split())]
        table.add_column(name, justify="right" if i >= left else "left", min_width=max(map(cell_len, words), default=0))
    for row in rows:
        table.add_row(*row)
    return table


def print_table(console: Console, shown: Table) -> None:
    """Print a complete table. If a terminal has too little space, columns become as narrow as they can, then the
    gaps between them narrow, too; lines that are still wider than the console continue on the next line."""
    endless = console.options.update_width(1000)

    def width() -> int:
        return console.measure(shown, options=endless).maximum

    if console.is_terminal and width() > console.width:
        for column in shown.columns:
            column.width = column.min_width
        for gap in (1, 0):  # besides the box's own
            shown.padding = (0, gap, 0, 0)
            if width() <= console.width:
                break
    shown.width = width()
    console.print(shown, crop=False, soft_wrap=False)


def as_text(shown: Table) -> str:
    """A table as plain lines at full width, which a console would cut off."""
    file = io.StringIO()
    Console(file=file, width=1000, color_system=None, markup=False, emoji=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def bar(share: float, width: int) -> str:
    """A bar of `share` of the width, from one character to all."""
    return "█" * min(width, max(1, round(share * width)))


def clock_time(seconds: float) -> str:
    """`1:52`, or `2:03:04` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class StatusLine:
    """The last line of a terminal, below text that is written in the block and scrolls above it. Without a terminal, or
    if it is not to be `shown`, nothing is written."""

    def __init__(self, console: Console, *, shown: bool = True) -> None:
        self.console, self.shown = console, shown and console.is_terminal and not console.is_dumb_terminal
        self.height = 0  # of the terminal when the line was set apart

    def __enter__(self) -> StatusLine:
        return self

    def update(self, text: str) -> None:
        """Replace the line."""
        if not self.shown:
            return
        width, height = self.console.size
        begin = ""
        if height != self.height:  # make room below the text, then scroll only what is above the last line
            begin, self.height = f"\x1bD\x1bM\x1b7\x1b[1;{height - 1}r\x1b8", height
        line = text[: width - 1]
        self.console.file.write(f"{begin}\x1b7\x1b[{height};1H\x1b[2K\x1b[2m{line}\x1b[0m\x1b8")
        self.console.file.flush()

    def __exit__(self, *exception: object) -> None:
        if self.height:
            self.console.file.write(f"\x1b7\x1b[r\x1b[{self.height};1H\x1b[2K\x1b8")
            self.console.file.flush()


@contextmanager
def progress(console: Console, what: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A progress bar; the block calls report(fraction, note). In a log file, a line every few seconds, and the last
    one."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=30),
            TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[note]}", markup=False), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=1.0, note="")
            yield lambda fraction, note: bar.update(task, completed=fraction, note=note)
        return
    began, shown, done, held = clock(), clock() - LOG_EVERY, False, ""

    def report(fraction: float, note: str) -> None:
        nonlocal shown, done, held
        if done:
            return
        held = f"{what} {fraction:.0%}  {note}  {clock() - began:.0f} s"
        if clock() - shown >= LOG_EVERY or fraction >= 1:
            shown, done = clock(), fraction >= 1
            console.print(held)
            held = ""

    yield report
    if held:
        console.print(held)
