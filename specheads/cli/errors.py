"""How commands and the scripts in train/ end: one line on stderr for bad input, and for Ctrl-C at any time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

CLIENTS = ("httpx", "httpx2")  # HTTP clients of the hub; their connection errors are not OSErrors


class Stopped(Exception):
    """Ctrl-C. str() says where, if that is known: `before anything was measured`."""


def report(
    error: Exception, program: str, flags: Mapping[str, str] | None = None, typed: Collection[str] | None = None
) -> int:
    """Print in one line after the program's name what is wrong, and return the exit code of bad input, 2. An error that
    no user can mend is raised again.

    flags: the program's by the option names that errors use; typed: which of these options were given, if known.
    """
    broken = type(error).__module__.partition(".")[0] in CLIENTS
    if not broken and not isinstance(error, ValueError | OSError | ImportError):
        raise error
    if isinstance(error, OSError) and error.filename:
        message = f"{error.strerror}: {error.filename}"
    elif broken:
        message = f"the connection to the hub broke ({error}); start the command again"
    else:  # `render` is OptionError's; its module is not imported here, to keep --help fast
        message = error.render(flags or {}, typed) if hasattr(error, "render") else str(error)
    say(program, message)
    return 2


def usage_error(error: Any, words: Sequence[str]) -> str:
    """Typer's message for a command line that it could not parse, with the value it refused, and where to look."""
    message, context, param = error.format_message(), error.ctx, getattr(error, "param", None)
    if message.startswith("Invalid value for") and (
        value := value_after(names := getattr(param, "opts", ()), [hyphenated(word, names) for word in words])
    ):
        return f"{message}, not {value!r}"
    if context is None or "Did you mean" in message or "Possible options" in message:
        return message
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    return f"{message.rstrip('.')}; usage: {usage} (--help says more)"


def hyphenated(word: str, known: Collection[str]) -> str:
    """--max_new_tokens=8 as --max-new-tokens=8, if that is among the known flags."""
    name, equals, value = word.partition("=")
    spelled = name.replace("_", "-")
    return f"{spelled}{equals}{value}" if name.startswith("--") and spelled in known else word


def value_after(names: Collection[str], words: Sequence[str]) -> str | None:
    """The value that an option, given by its names, has among these words; None if it has none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else after or None
    return None


def say(program: str, message: str) -> None:
    """Print the message on stderr as one line."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)


def refuse_file(folder: Path, flag: str, path: Path | None = None) -> None:
    """ValueError if a file is in the folder's place or the folder is not writable, before anything is measured.
    path: what was given as `flag`, if not the folder itself; an existing file may be read."""
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag} {path or folder}: {nearest} is a file, not a folder; give another path")
    if not os.access(nearest, os.W_OK) and not (path and path.exists()):
        raise ValueError(f"{flag} {path or folder}: {nearest} cannot be written to; give another path")


def refuse_folder(path: Path, flag: str) -> None:
    """ValueError if no file can be written there, before anything is measured."""
    refuse_file(path.parent, flag, path)
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give a file")


def say_stopped(program: str, where: object = "") -> int:
    """Print that the program was stopped, and where, if that is known. Returns the exit code."""
    if _speaks():
        print(f"{program}: stopped {where}".rstrip(), file=sys.stderr, flush=True)
    return 130


def listen(program: str) -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, or exits at once during an import (torch's takes seconds): numpy and
    transformers would catch the exception there, and go on or fail later with an unrelated message."""

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                if _speaks():
                    os.write(2, f"{program}: stopped\n".encode())  # print() may be what is interrupted
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in a shell's background it is ignored
        signal.signal(signal.SIGINT, stop)


def _speaks() -> bool:
    """Whether this process reports: of a run in several, the first."""
    return os.environ.get("RANK", "0") == "0"
