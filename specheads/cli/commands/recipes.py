"""`specheads recipes`: list the recipes that come with specheads, or print one."""

from __future__ import annotations

from specheads.cli.app import emit
from specheads.cli.hanging import print_hanging
from specheads.cli.options.training import RecipesOptions
from specheads.cli.shipped import USES, kind_of, recipe_names, shipped_recipe, summary


def run(options: RecipesOptions) -> None:
    if options.name is None:
        if options.as_json:
            emit({"recipes": [_entry(name) for name in recipe_names()]})
        else:
            _print_list()
        return
    file = shipped_recipe(options.name)
    if options.as_json:
        emit({**_entry(options.name), "path": str(file), "text": file.read_text("utf8")})
    elif options.path:
        print(file)
    else:
        print(file.read_text("utf8"), end="")


def _print_list() -> None:
    width = max(map(len, recipe_names()))
    for kind, use in USES.items():
        print(f"{use}:")
        for name in recipe_names(kind):
            print_hanging(f"  {name:<{width}}  {summary(name)}", width + 4)
        print()
    print_hanging("print one: specheads recipes NAME; copy one to edit it: specheads recipes NAME > my.yaml", 0)


def _entry(name: str) -> dict[str, str]:
    return {"name": name, "for": kind_of(name), "summary": summary(name)}
