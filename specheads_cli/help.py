"""How the help texts look: arguments and values by plain names, and the commands in the order of their use."""

from __future__ import annotations

import re
from typing import Any

import typer

# From a first look over training and decoding to measuring and to other programs.
ORDER = (
    "doctor", "demo", "info", "recipes", "features", "train", "curves", "parity", "calibrate", "generate", "chat",
    "tune", "evaluate", "bench", "export", "import",
)  # fmt: skip
_VALUES = {"str": "TEXT", "int": "INT", "float": "NUMBER", "path": "PATH"}  # Typer's name of a type → ours


class Command(typer.core.TyperCommand):
    """A command whose arguments are spelled by their metavars alone: MODEL, [MODEL], RUN..."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(param.metavar) for param in self.params if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            params = [param for param in self.get_params(ctx) if param.param_type_name == kind]
            if records := [_record(param, ctx) for param in params]:
                with formatter.section(title):
                    formatter.write_dl(records)


def _record(param: Any, ctx: Any) -> tuple[str, str]:
    """The name and the help of an argument or option. Typer would write `MODEL <str>` and `--nodes <list[int]>`."""
    name, text = param.get_help_record(ctx)
    if param.param_type_name == "argument":
        return param.metavar, text
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", lambda kind: _VALUES[kind[1].lower()], name), text


def in_order(names: list[str]) -> list[str]:
    """The commands in ORDER, others after them."""
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
