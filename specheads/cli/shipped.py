"""The recipes that come with the package, by name: `eagle3` is recipes/eagle3.yaml, `accelerate/ddp` a launch config;
and the checkpoints of a clone.

A wheel holds the repository's recipes/ as specheads/recipes/ (see setup.py). Nothing here imports torch, so that
listing and completing names is quick.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal

Kind = Literal["train", "bench", "launch"]
USES: dict[Kind, str] = {
    "train": "specheads train, specheads features",
    "bench": "specheads bench --recipe",
    "launch": "accelerate launch --config_file",
}


def recipes_dir() -> Path:
    """In the package if it was installed from a wheel, else beside it."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names(kind: Kind | None = None) -> list[str]:
    """Names in order, those in the folder itself first. kind None: all."""
    paths = (path.relative_to(recipes_dir()).with_suffix("") for path in recipes_dir().rglob("*.yaml"))
    names = sorted((path.as_posix() for path in paths), key=lambda name: (name.count("/"), name))
    return [name for name in names if kind in (None, kind_of(name))]


def find_model(name: str) -> str:
    """What MODEL on a command line means: in a clone eagle3 is checkpoints/eagle3, as for `bench -d`, unless something
    here has that name."""
    folder = Path(__file__).resolve().parents[2] / "checkpoints" / name
    if Path(name).name != name or Path(name).exists() or not (folder / "config.json").is_file():
        return name
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def kind_of(name: str) -> Kind:
    if name.startswith("accelerate/"):
        return "launch"
    return "bench" if name.startswith("bench_") else "train"


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe. ValueError, with the nearest name, if there is none."""
    if name not in recipe_names():
        raise ValueError(f"no shipped recipe {name!r}; {_nearest(name, recipe_names())}")
    return recipes_dir() / f"{name}.yaml"


def find_recipe(recipe: str, kind: Kind) -> Path:
    """The file that RECIPE on a command line means: a path, else the name of a shipped recipe of this kind.

    ValueError, with the nearest name, if it is neither.
    """
    if Path(recipe).is_file():
        return Path(recipe)
    if recipe in recipe_names(kind):
        return shipped_recipe(recipe)
    if recipe in recipe_names():
        raise ValueError(f"the shipped recipe {recipe!r} is for {USES[kind_of(recipe)]}")
    raise ValueError(f"{recipe} is neither a file nor a shipped recipe; {_nearest(recipe, recipe_names(kind))}")


def summary(name: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    comment = []
    for line in shipped_recipe(name).read_text("utf8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return re.split(r"\.\s", " ".join(comment))[0].rstrip(".")


def _nearest(recipe: str, names: list[str]) -> str:
    """A hint with the nearest name. recipes/eagle3.yaml, as in the README, is a path only in a clone."""
    name = recipe.removeprefix("recipes/").removesuffix(".yaml")
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped: {', '.join(names)}"
    return f"{hint} (`specheads recipes` lists them)"
