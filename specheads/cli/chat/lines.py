"""Reads prompts and commands, of one line or several, from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT, MORE = "> ", "… "
QUOTES = '"""'
HISTORY = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "specheads", "chat_history")


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
    """A function that reads a line: in a terminal with history and Tab completion if prompt_toolkit is installed, in a
    pipe without a prompt.

    complete(line up to the cursor) → the possible completions of its last word.
    """
    if not interactive():
        return _from_pipe
    if importlib.util.find_spec("prompt_toolkit") is None:
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            line = document.text_before_cursor
            for word in complete(line):
                yield Completion(word, start_position=-len(line.rpartition(" ")[2]))

    try:
        HISTORY.parent.mkdir(parents=True, exist_ok=True)
        HISTORY.touch(mode=0o600)  # what is asked is nobody else's to read
        history: Any = FileHistory(str(HISTORY))
    except OSError:  # a home that cannot be written to
        history = InMemoryHistory()
    session: Any = PromptSession(completer=Words(), history=history, complete_while_typing=False)
    return lambda prompt: str(session.prompt(prompt))


def _from_pipe(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n").removesuffix("\r")
