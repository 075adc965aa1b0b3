"""The Typer app, and commands made of dataclasses: a field is an argument or option, the docstring the help.

A function of the options does a command's work. Its module is imported after the arguments are parsed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from specheads.cli.complete import complete_recipe
from specheads.cli.errors import Stopped, hyphenated
from specheads.cli.shipped import find_model

DEBUG = "SPECHEADS_DEBUG"
OFF = ("", "0", "f", "false", "n", "no", "off")  # values with which an environment variable, as Typer reads it, is off
_VALUES = {"str": "TEXT", "int": "INT", "float": "NUMBER", "path": "PATH"}  # Typer's name of a type → ours
# Library names of options whose name on the command line differs.
_OTHER_NAMES = {"drafters": "head", "trees": "tree", "k_matrices": "k_matrix", "train": "data"}


class _Group(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # Typer would exit with 130 and no message
            raise Stopped(str(error)) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]  # in the order of program.py


class Command(typer.core.TyperCommand):
    """A command whose help text has no type of Python, and whose arguments are spelled by their metavars: MODEL...

    Its options are also known with underscores for hyphens: --max_new_tokens.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, [hyphenated(word, known) for word in args])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(param.metavar) for param in self.params if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            params = [param for param in self.get_params(ctx) if param.param_type_name == kind]
            if records := [_help_record(param, ctx) for param in params]:
                with formatter.section(title):
                    formatter.write_dl(records)


def _help_record(param: Any, ctx: Any) -> tuple[str, str]:
    """The name and the help of an argument or option. Typer would write `MODEL <str>` and `--nodes <list[int]>`."""
    name, text = param.get_help_record(ctx)
    if param.param_type_name == "argument":
        return param.metavar, text
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", lambda kind: _VALUES[kind[1].lower()], name), text


app = typer.Typer(
    name="specheads", cls=_Group, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip


def add_command(name: str, options: type, work: str, command: type[Command] = Command) -> None:
    """Make a command of a dataclass whose fields are made by `specheads.options.option` and `argument`.

    work: "module:function" in specheads.cli. The function takes the options and returns the exit code, None for 0.
    Options with a classmethod read() are made by it, from what was typed: other values may come from a recipe.
    """
    module, _, function = work.partition(":")
    read = getattr(options, "read", None)

    def invoke(context: typer.Context, **values: Any) -> None:
        values |= {name: _find_models(values[name]) for name in named}
        typed = {name: value for name, value in values.items() if _is_typed(context, name)}
        request = options(**values) if read is None else read(typed)  # refuses what does not fit; torch comes after it
        if code := getattr(importlib.import_module(f"specheads.cli.{module}"), function)(request):
            raise typer.Exit(code)

    hints = get_type_hints(options)
    known = {field.name: field for field in fields(options)}
    named = [name for name, field in known.items() if field.metadata.get("named")]
    # Its own before those that it shares with other commands.
    names = [name for kind in options.__mro__ for name in vars(kind).get("__annotations__", ()) if name in known]
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_parameter(known[name], hints[name]) for name in dict.fromkeys(names)]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    invoke.__doc__ = options.__doc__
    app.command(name, cls=command)(invoke)


def _find_models(value: Any) -> Any:
    if isinstance(value, list):
        return [_find_models(one) for one in value]
    return value if value is None else type(value)(find_model(str(value)))


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    """The parameter from which Typer makes an argument or option. Of a tuple it is repeatable, or of numbers a text
    such as 1,4."""
    declared = dict(field.metadata)
    flags = declared.pop("flags", ())
    declared.pop("named", None)
    if recipes := declared.pop("recipes", None):
        declared["autocompletion"] = complete_recipe(recipes)
    if kind is bool and not flags:
        flags = (f"--{field.name.replace('_', '-')}",)  # Typer would add --no-…
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if isinstance(default, tuple):
        numbers = kind in (tuple[int, ...], tuple[float, ...])
        default = ",".join(f"{value:g}" for value in default) if numbers else None
        kind = str if numbers else list[kind.__args__[0]] | None
    make: Callable[..., Any] = typer.Argument if declared.pop("positional", False) else typer.Option
    annotation = Annotated[kind, make(*flags, **declared)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def emit(record: Any) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def output(record: Any, show: Callable[[Any], None], as_json: bool) -> None:
    """Print a record as JSON, or as `show` shows it to people."""
    if as_json:
        emit(record)
    else:
        show(record)


def flags(line: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """For the command in `line`: its flags by the option names that errors use, and the names that were typed.

    See OptionError.said."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = next((word for word in line if word in commands), "")
    params = commands[name].params if name else []
    known = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    words = {hyphenated(word, known).partition("=")[0] for word in line}
    flag_of: dict[str, str] = {}
    typed: set[str] = set()
    for option in params:
        if option.param_type_name == "option":
            flag = next((flag for flag in option.opts if flag.startswith("--")), option.opts[0])
            others = [library for library, here in _OTHER_NAMES.items() if here == option.name]
            names = [option.name, f"{name}.{option.name}", *others]
            flag_of |= dict.fromkeys(names, flag)
            typed |= {*names} if words & {*option.opts, *option.secondary_opts} else set()
    return flag_of, typed


def _print_version(wanted: bool) -> None:
    if wanted:
        import specheads

        print(f"specheads {specheads.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar=DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """Train draft heads for a frozen language model and decode with them: the same text, several times faster.

    In these examples my/model is any language model, by path or hub id, and out/head a head that `train` saved. In a
    clone of the repository checkpoints/eagle3 is one.

    \b
    Examples:
      specheads doctor
      specheads demo
      specheads recipes
      specheads train eagle3 base=my/model data.train=my.jsonl \\
        training.output_dir=out/head
      specheads curves runs/a runs/b --out compare.png
      specheads generate out/head --prompt "def fibonacci(n):" --live
      specheads chat out/head
      specheads bench out/head -d plain -d head --batch 1 --temperature 0 \\
        --num-prompts 8
      specheads export out/head served --to vllm
      specheads import downloaded/eagle3 out/head --base my/model
    """
