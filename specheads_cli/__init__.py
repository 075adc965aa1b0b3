"""The `specheads` command. Bad input is one line on stderr and exit code 2.

It is a package of its own and imports specheads only inside the commands, so that --help does not wait for torch.
Importing any part of specheads imports transformers, whose Auto classes must know the type of its checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from specheads_cli import bench, chat, decode, doctor, features, formats, measure, recipes, train, tune
from specheads_cli.app import DEBUG, OFF, Stopped, app, flags
from specheads_cli.errors import report, say, usage_error
from specheads_cli.interrupt import listen, say_stopped

__all__ = [
    "app",
    "bench",
    "chat",
    "decode",
    "doctor",
    "features",
    "formats",
    "main",
    "measure",
    "recipes",
    "run",
    "train",
    "tune",
]


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Bad input is one line on stderr and 2."""
    given = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    try:
        return int(app(given, prog_name="specheads", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt, Stopped) as stopped:
        return say_stopped("specheads", stopped)
    except typer.TyperException as error:
        say("specheads", usage_error(error, given))
        return 2
    except Exception as error:
        if "--debug" in given or os.environ.get(DEBUG, "").lower() not in OFF:
            raise
        return report(error, "specheads", *flags(given))


def main() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `<&-`
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments: whoever reads it names what is not UTF-8
    listen("specheads")
    sys.exit(run())
