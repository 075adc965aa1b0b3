"""Commands that take a recipe: a flag that is an option of recipes is answered with its KEY=VALUE."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from specheads_cli.errors import value_after
from specheads_cli.help import Command


class RecipeCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # parsing empties it
        own = [flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)]
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            flag = getattr(error, "option_name", "")
            if not flag or flag in own:
                raise
            raise ValueError(f"no such option: {flag}{flag_hint(flag, given, own)}") from None


def flag_hint(flag: str, given: Sequence[str], own: Iterable[str]) -> str:
    """`; did you mean KEY=VALUE?` for an unknown flag among the words `given`, if it is an option of recipes or similar
    to one; or the program's `own` flag that is similar."""
    from specheads.training.recipe.recipe import key_hint

    value = value_after([flag], given)
    value = "…" if value is None or value.startswith("-") else value
    return key_hint(flag, value, similar=False) or near_flag(flag, own) or key_hint(flag, value, similar=True)


def near_flag(flag: str, own: Iterable[str]) -> str:
    near = difflib.get_close_matches(flag.lstrip("-"), [name.lstrip("-") for name in own], n=1)
    return f"; did you mean --{near[0]}?" if near else ""
