"""specheads bench: its options are the fields of BenchOptions."""

from __future__ import annotations

import inspect
import shlex
import sys
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from specheads.bench.compare.options import BenchOptions
from specheads.cli.app import emit
from specheads.cli.complete import complete_recipe
from specheads.cli.errors import refuse_file, refuse_folder
from specheads.cli.options.typed import Json
from specheads.cli.shipped import find_recipe


def parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    """The argument or option of a field: of numbers a text such as 1,4, of other values a flag that is repeatable."""
    declared, default = dict(field.metadata), field.default
    if field.name == "recipe":
        declared["autocompletion"] = complete_recipe("bench")
    flags = declared.pop("flags", ())
    make: Any = typer.Argument if declared.pop("positional", False) else typer.Option
    if isinstance(default, tuple):
        numbers = kind in (tuple[int, ...], tuple[float, ...])
        default = ",".join(f"{value:g}" for value in default) if numbers else None
        kind = str if numbers else list[kind.__args__[0]] | None
    elif kind is bool and not flags:
        flags = (f"--{field.name.replace('_', '-')}",)  # Typer would add --no-…
    annotation = Annotated[kind, make(*flags, **declared)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def bench(context: typer.Context, as_json: bool = False, **values: Any) -> None:
    sources = {name: context.get_parameter_source(name) for name in values}
    typed = {name: values[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    if typed.get("recipe") is not None:
        typed["recipe"] = str(find_recipe(typed["recipe"], "bench"))
    options = BenchOptions.read(typed)
    refuse_file(options.out, "--out")
    if options.record is not None:
        refuse_folder(options.record, "--record")
    from specheads.cli.commands import bench as command

    record = command.bench(options, shlex.join(["specheads", *sys.argv[1:]]))
    if as_json:
        emit(record)
    else:
        command.show(record)
    if not record["complete"]:
        raise typer.Exit(130)


_HINTS = get_type_hints(BenchOptions)
_PARAMETERS = [
    inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    *(parameter(field, _HINTS[field.name]) for field in fields(BenchOptions)),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json),
]
bench.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
bench.__annotations__ = {one.name: one.annotation for one in _PARAMETERS}
bench.__doc__ = BenchOptions.__doc__
