"""What the scripts in train/ and the commands that take a recipe share: a flag that is an option of recipes is read as
its KEY=VALUE, and bad input ends in one line.

The scripts import torch in run_script(), after listen(), so that Ctrl-C during that import is one line, too.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import typer

from specheads.cli.app import Command
from specheads.cli.errors import hyphenated, report, say_stopped, value_after


class RecipeCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # parsing empties it
        known = [flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)]
        try:
            return super().parse_args(ctx, as_overrides([hyphenated(word, known) for word in args], known))
        except typer.TyperException as error:
            flag = getattr(error, "option_name", "")
            if not flag or flag in known:
                raise
            raise ValueError(f"no such option: {flag}{flag_hint(flag, words, known)}") from None


def as_overrides(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words with each flag that has the name of a recipe's option as KEY=VALUE: --learning_rate 1e-3 is
    training.learning_rate=1e-3, and --bf16 training.bf16=true. known: the program's own flags. ValueError for one
    without a value."""
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        key = None
        if flag.startswith("--") and flag != "--" and flag not in known:
            from specheads.training.recipe.reader import is_switch
            from specheads.training.recipe.recipe import flag_key

            key = flag_key(flag)
        if key is None:
            result.append(word)
            continue
        if not equals:
            follows = rest[0] if rest and not rest[0].startswith("--") and "=" not in rest[0] else None
            if is_switch(key):
                value = rest.pop(0) if follows in ("true", "false", "True", "False", "null") else "true"
            elif follows is None:
                raise ValueError(f"{flag} needs a value: {flag} VALUE, or {key}=VALUE")
            else:
                value = rest.pop(0)
        result.append(f"{key}={value}")
    return result


def flag_hint(flag: str, words: Sequence[str], known: Iterable[str]) -> str:
    """`; did you mean KEY=VALUE?` for an unknown flag among the words, if it is an option of recipes or similar to one;
    or the program's known flag that is similar."""
    from specheads.training.recipe.recipe import key_hint

    value = value_after([flag], words)
    value = "…" if value is None or value.startswith("-") else value
    return key_hint(flag, value, similar=False) or near_flag(flag, known) or key_hint(flag, value, similar=True)


def near_flag(flag: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(flag.lstrip("-"), [name.lstrip("-") for name in known], n=1)
    return f"; did you mean --{near[0]}?" if near else ""


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description verbatim, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False) and action.option_strings
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """Bad options are a ValueError, with the nearest name for an unknown one."""

    def error(self, message: str) -> Any:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        raise ValueError(message + (self.hint(unknown[1]) if unknown else ""))

    def hint(self, flag: str) -> str:
        return near_flag(flag, self._option_string_actions)


class RecipeParser(Parser):
    """The parser of a script that takes a recipe."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=Help)
        self.add_argument("recipe", help="a YAML file, or the name of a shipped one, such as eagle3")
        self.add_argument("overrides", nargs="*", metavar="key=value", help="options of the recipe to change")

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else list(args)
        self.words = as_overrides(self.words, self._option_string_actions)
        return super().parse_intermixed_args(self.words, namespace)

    def error(self, message: str) -> Any:
        super().error(message.replace("required: recipe, key=value", "required: recipe"))

    def hint(self, flag: str) -> str:
        return flag_hint(flag, self.words, self._option_string_actions)


def options_from(kind: Any, description: str | None, arguments: Sequence[str] | None) -> Any:
    """The dataclass `kind` of a script's options, from its command line: --name value for each field."""
    from transformers import HfArgumentParser

    class FieldParser(HfArgumentParser, Parser):
        pass

    parser = FieldParser([kind], description=description, formatter_class=Help)
    words = None if arguments is None else list(arguments)
    options, *rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if rest[-1]:
        parser.error(f"unrecognized arguments: {' '.join(rest[-1])}")
    return options


def run_script(program: str, work: Callable[[], int | None], flags: Sequence[str] = ()) -> int:
    """Do the work and return the exit code: what it returns, or one line on stderr for bad input and for Ctrl-C.

    flags: options that errors name, which are spelled --name."""
    try:
        return work() or 0
    except KeyboardInterrupt as stopped:
        return say_stopped(program, stopped)
    except Exception as error:
        return report(error, program, {name.replace("-", "_"): f"--{name}" for name in flags})
