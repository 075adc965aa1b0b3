"""The program: its commands, and how it ends. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from specheads.cli.app import DEBUG, OFF, add_command, app, flags
from specheads.cli.errors import Stopped, listen, report, say, say_stopped, usage_error
from specheads.cli.options.audit import AuditOptions
from specheads.cli.options.checkpoints import DoctorOptions, ExportOptions, ImportOptions, InfoOptions
from specheads.cli.options.decode import ChatOptions, GenerateOptions
from specheads.cli.options.measure import BenchCommand, CalibrateOptions, ParityOptions, TuneOptions
from specheads.cli.options.report import ReportOptions
from specheads.cli.options.training import (
    AdaptCommand,
    CurvesOptions,
    DemoOptions,
    FeaturesOptions,
    RecipesOptions,
    TrainOptions,
)
from specheads.cli.script import RecipeCommand
from specheads.training.self_distill.options import Options as DistillOptions

# In the order of --help, the line of work: a first look, data, training, decoding, measuring, other programs.
add_command("doctor", DoctorOptions, "doctor.report:run")
add_command("demo", DemoOptions, "demo.story:run")
add_command("info", InfoOptions, "commands.info:run")
add_command("recipes", RecipesOptions, "commands.recipes:run")
add_command("distill", DistillOptions, "commands.distill:run")
add_command("features", FeaturesOptions, "commands.features:run", RecipeCommand)
add_command("train", TrainOptions, "commands.train:run", RecipeCommand)
add_command("adapt", AdaptCommand, "commands.adapt:run")
add_command("curves", CurvesOptions, "commands.train:draw_curves")
add_command("parity", ParityOptions, "commands.calibration:check_parity")
add_command("calibrate", CalibrateOptions, "commands.calibration:find_tree")
add_command("generate", GenerateOptions, "commands.generate:run")
add_command("chat", ChatOptions, "chat.console:run")
add_command("tune", TuneOptions, "commands.tune:run")
add_command("bench", BenchCommand, "commands.bench:run")
add_command("report", ReportOptions, "commands.report:run")
add_command("audit", AuditOptions, "commands.audit:run")
add_command("export", ExportOptions, "commands.formats:export")
add_command("import", ImportOptions, "commands.formats:import_head")


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Bad input is one line on stderr and 2."""
    words = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    try:
        return int(app(words, prog_name="specheads", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt, Stopped) as stopped:
        return say_stopped("specheads", stopped)
    except typer.TyperException as error:
        say("specheads", usage_error(error, words))
        return 2
    except Exception as error:
        if "--debug" in words or os.environ.get(DEBUG, "").lower() not in OFF:
            raise
        return report(error, "specheads", *flags(words))


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
