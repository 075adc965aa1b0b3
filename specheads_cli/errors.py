"""Errors that the user can do something about, in one line on stderr. Commands and the scripts in train/ end by it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

CLIENTS = ("httpx", "httpx2")  # HTTP clients of the hub; their connection errors are not OSErrors


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
    else:  # `said` is OptionError's; its module is not imported here, to keep --help fast
        message = error.render(flags or {}, typed) if hasattr(error, "render") else str(error)
    say(program, message)
    return 2


def usage_error(error: Any, given: Sequence[str]) -> str:
    """Typer's message for a command line that it could not parse, with the value it refused, and where to look."""
    message, context, param = error.format_message(), error.ctx, getattr(error, "param", None)
    if message.startswith("Invalid value for") and (value := value_after(getattr(param, "opts", ()), given)):
        return f"{message}, not {value!r}"
    if context is None or "Did you mean" in message or "Possible options" in message:
        return message
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    return f"{message.rstrip('.')}; usage: {usage} (--help says more)"


def value_after(names: Collection[str], given: Sequence[str]) -> str | None:
    """The value that an option, given by its names, has among these words; None if it has none."""
    for word, after in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else after or None
    return None


def say(program: str, message: str) -> None:
    """Print the message on stderr as one line."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
