"""Reads prompts and commands, of one line or several, from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import re
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
    r"""The next entry, from the lines that ask(prompt) returns; EOFError after the last.

    A backslash at the end of a line joins it to the next; a prompt is `unescaped`. The lines between two \"\"\" are one
    prompt, taken literally, even if it begins with a slash. The end of piped input closes an open prompt.
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
    return Entry(unescaped(line))


def unescaped(text: str) -> str:
    r"""The text with each \n replaced by a newline and each \t by a tab; \\n and \\t become a literal \n and \t."""
    meant = {r"\n": "\n", r"\t": "\t", r"\\n": r"\n", r"\\t": r"\t"}
    return re.sub(r"\\{1,2}[nt]", lambda match: meant[match[0]], text)


def interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def asker(complete: Callable[[str], list[str]]) -> Callable[[str], str]:
    """A function that reads a line: in a terminal with history and Tab completion, else from stdin without a prompt.

    complete(line up to the cursor) → the possible completions of its last word.
    """
    if not interactive():
        return _from_pipe
    with contextlib.suppress(ImportError):  # not on every system
        import readline

        def completed(text: str, state: int) -> str | None:
            words = complete(readline.get_line_buffer()[: readline.get_endidx()])
            return words[state] if state < len(words) else None

        readline.set_completer(completed)
        readline.set_completer_delims(" ")
        # macOS has libedit instead of readline, with other commands.
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    return input


def _from_pipe(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n").removesuffix("\r")
