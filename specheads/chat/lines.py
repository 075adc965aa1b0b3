"""What is typed or piped in: prompts and commands, each of one line or several."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

PROMPT, MORE = "> ", "… "
QUOTES = '"""'


@dataclass(frozen=True)
class Entry:
    """A prompt, or a command without its slash."""

    text: str
    command: bool = False


def read_entry(ask: Callable[[str], str]) -> Entry:
    r"""The next entry, of the lines that ask(prompt) gives; EOFError behind the last.

    A backslash at the end of a line carries on in the next. Behind \"\"\" all lines up to the next \"\"\" are a prompt,
    even one that begins with a slash; so is what a pipe ends in the middle of.
    """
    line = ask(PROMPT)
    if line.startswith(QUOTES):
        text = line.removeprefix(QUOTES)
        with contextlib.suppress(EOFError):
            while not text.endswith(QUOTES):
                text += "\n" + ask(MORE)
        return Entry(text.removesuffix(QUOTES).removeprefix("\n"))
    with contextlib.suppress(EOFError):
        while line.endswith("\\"):
            line = line[:-1] + "\n"
            line += ask(MORE)
    if line.startswith("/"):
        return Entry(line[1:], command=True)
    return Entry(line)


def interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def asker(names: list[str]) -> Callable[[str], str]:
    """Reads a line, without its end: in a terminal with history and completion of the commands `names`, else without
    a word on stdout."""
    if not interactive():
        return _from_pipe
    with contextlib.suppress(ImportError):  # not on every system
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [f"/{name} " for name in names if f"/{name}".startswith(text)] if text.startswith("/") else []
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")
    return input


def _from_pipe(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n").removesuffix("\r")
