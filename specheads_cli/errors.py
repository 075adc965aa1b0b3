"""Errors that the user can do something about, in one line on stderr. Commands and the scripts in train/ end by it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

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
        message = error.said(flags or {}, typed) if hasattr(error, "said") else str(error)
    say(program, message)
    return 2


def say(program: str, message: str) -> None:
    """Print the message on stderr as one line."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
