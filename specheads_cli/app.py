"""The Typer app, and the arguments and options that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specheads_cli.complete import (
    DRAFTERS,
    DTYPES,
    LOSSLESS,
    LOSSY,
    RULES,
    TREES,
    complete_recipe,
    complete_usages,
    complete_words,
)
from specheads_cli.help import Command, in_order

DEBUG = "SPECHEADS_DEBUG"
OFF = ("", "0", "f", "false", "n", "no", "off")  # values with which an environment variable, as Typer reads it, is off


class Stopped(Exception):
    """Ctrl-C. str() says where, if that is known: `before anything was measured`."""


class _Group(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # Typer would exit with 130 and no message
            raise Stopped(str(error)) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return in_order([*self.commands])


class _App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": Command, **options})


app = _App(
    name="specheads", cls=_Group, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Head checkpoint: a directory or a hub id.")]
Base = Annotated[str | None, typer.Option(help="Base model to use instead of the one the checkpoint names.")]
DType = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16; auto: float32 on a CPU, else the dtype of the checkpoint.",
        autocompletion=complete_words(*DTYPES),
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto: the GPU if there is one.")]
Target = Annotated[
    str, typer.Argument(metavar="MODEL", help="Head checkpoint or plain Hugging Face model: a directory or hub id.")
]
Assistant = Annotated[
    str | None, typer.Option(metavar="SMALL_MODEL", help="A smaller model to draft with; its vocabulary may differ.")
]
Drafts = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"What drafts: auto[:FILE], head, {', '.join(DRAFTERS)}, a checkpoint, a cascade:DRAFTER+DRAFTER…, in "
        "which model:PATH is a draft model, or none. auto picks what pays at each step, by the costs of "
        "`specheads tune`. "
        "(default: the assistant, else the head, else lookup; for `generate` with a head, auto).",
    ),
]
KMatrix = Annotated[
    str | None, typer.Option(metavar="ROWS", help="How many tokens each drafter of a cascade drafts: [[5,8],[0,8]].")
]
Leniency = Annotated[float, typer.Option(min=1.0, help="Leniency between the drafters of a cascade.")]
Tree = Annotated[
    str | None,
    typer.Option(
        help=f"Draft tree: {', '.join(TREES)} (default: the head's).",
        autocompletion=complete_usages(*TREES),
    ),
]
Accept = Annotated[
    str | None,
    typer.Option(
        help=f"Which drafts are accepted: {', '.join(LOSSLESS)} (lossless); {', '.join(LOSSY)} (default: exact).",
        autocompletion=complete_usages(*RULES),
    ),
]
# Library names of options whose name on the command line differs.
_OTHER_NAMES = {
    "drafters": "head", "trees": "tree", "k_matrices": "k_matrix", "train": "data", "launch.processes": "processes",
    "launch.distributed": "distributed",
}  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="YAML file, or the name of a shipped recipe (`specheads recipes` lists them).",
        autocompletion=complete_recipe("train"),
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the recipe's.")
]


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def refuse_file(folder: Path, flag: str, path: Path | None = None) -> None:
    """ValueError if a file is in the folder's place or the folder is not writable, before anything is measured.
    path: what was given as `flag`, if not the folder itself; an existing file may be read."""
    found = next(one for one in (folder, *folder.parents) if one.exists())
    if not found.is_dir():
        raise ValueError(f"{flag} {path or folder}: {found} is a file, not a folder; give another path")
    if not os.access(found, os.W_OK) and not (path and path.exists()):
        raise ValueError(f"{flag} {path or folder}: {found} cannot be written to; give another path")


def refuse_folder(path: Path, flag: str) -> None:
    """ValueError if no file can be written there, before anything is measured."""
    refuse_file(path.parent, flag, path)
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give a file")


def flags(given: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """For the command in `given`: its flags by the option names that errors use, and the names that were typed.

    See OptionError.said."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = next((word for word in given if word in commands), "")
    words = {word.partition("=")[0] for word in given}
    found: dict[str, str] = {}
    typed: set[str] = set()
    for option in commands[name].params if name else ():
        if option.param_type_name == "option":
            flag = next((flag for flag in option.opts if flag.startswith("--")), option.opts[0])
            names = [
                option.name,
                f"{name}.{option.name}",
                *(k for k, own in _OTHER_NAMES.items() if own == option.name),
            ]
            found |= dict.fromkeys(names, flag)
            typed |= {*names} if words & {*option.opts, *option.secondary_opts} else set()
    return found, typed


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
      specheads train eagle3 base=my/model data.train=my.jsonl training.output_dir=out/head
      specheads curves runs/a runs/b --out compare.png
      specheads generate out/head --prompt "def fibonacci(n):" --color-depth
      specheads chat out/head
      specheads evaluate out/head --num-prompts 8
      specheads bench out/head --batch 1 --temperature 0
      specheads export out/head served --to vllm
      specheads import downloaded/eagle3 out/head --base my/model
    """
