"""specheads recipes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import app, emit
from specheads_cli.complete import complete_recipe
from specheads_cli.shipped import USES, kind_of, recipe_names, shipped_recipe, summary


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Recipe to print.", autocompletion=complete_recipe(None))
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Copy it to this new file instead.")] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the path of its file instead.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list, or the recipe and its text, as one JSON object.")
    ] = False,
) -> None:
    """List the recipes that come with specheads, or print one.

    They are for train, features, bench and accelerate launch.

    \b
    Examples:
      specheads recipes
      specheads recipes eagle3 --output my.yaml
      accelerate launch --config_file "$(specheads recipes accelerate/ddp --path)" -m specheads train eagle3
    """
    if name is None:
        if output is not None or path:
            raise ValueError(f"{'--path' if path else '--output'}: give the NAME of a recipe too")
        _emit_list() if as_json else _print_list()
        return
    file = shipped_recipe(name)
    asked = [flag for flag, given in (("--output", output), ("--path", path), ("--json", as_json)) if given]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)}: give one of them")
    if as_json:
        emit({**_entry(name), "path": str(file), "text": file.read_text("utf8")})
    elif path:
        print(file)
    elif output is None:
        print(file.read_text("utf8"), end="")
    elif output.exists():
        raise ValueError(f"--output {output} exists: give a new file")
    else:
        shutil.copyfile(file, output)
        print(f"saved {output}, for {USES[kind_of(name)]}")


def _print_list() -> None:
    width = max(map(len, recipe_names()))
    for kind, use in USES.items():
        print(f"{use}:")
        for name in recipe_names(kind):
            print(f"  {name:<{width}}  {summary(name)}")
        print()
    print("print one: specheads recipes NAME; copy one to edit it: specheads recipes NAME --output my.yaml")


def _emit_list() -> None:
    emit({"recipes": [_entry(name) for name in recipe_names()]})


def _entry(name: str) -> dict[str, str]:
    return {"name": name, "for": kind_of(name), "summary": summary(name)}
