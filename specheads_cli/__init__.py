"""The `specheads` command. Bad input is one line on stderr and exit code 2.

It is a package of its own and imports specheads only inside the commands, so that --help does not wait for torch.
Importing any part of specheads imports transformers, whose Auto classes must know the type of its checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

from specheads_cli import bench, chat, decode, doctor, features, formats, measure, recipes, sweep, train, tune
from specheads_cli.app import DEBUG, OFF, Stopped, app, flags
from specheads_cli.errors import report, say

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
    "sweep",
    "train",
    "tune",
]


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Bad input is one line on stderr and 2."""
    given = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    try:
        return int(app(given, prog_name="specheads", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt, Stopped) as stopped:
        print(f"specheads: stopped {stopped}".rstrip(), file=sys.stderr)
        return 130
    except typer.TyperException as error:
        say("specheads", error.format_message())
        return 2
    except Exception as error:
        if "--debug" in given or os.environ.get(DEBUG, "").lower() not in OFF:
            raise
        return report(error, "specheads", *flags(given))


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: raise KeyboardInterrupt, or exit at once during an import (torch's takes seconds): numpy and transformers
    would catch the exception there, and go on or fail later with an unrelated message."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"specheads: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `<&-`
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments: whoever reads it names what is not UTF-8
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in a shell's background it is ignored
        signal.signal(signal.SIGINT, _stop)
    sys.exit(run())
