"""The `specheads` command. Bad input is one line on stderr and exit code 2.

It stands beside the package, and imports it inside the commands, so that --help does not wait for torch: importing any
part of specheads imports transformers, since Auto classes must know the type of its checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

DEBUG = "SPECHEADS_DEBUG"

app = typer.Typer(
    name="specheads", add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Head checkpoint: a directory or a hub id.")]
Base = Annotated[str | None, typer.Option(help="Another base model than the one the checkpoint names.")]
DType = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; auto: float32 on a CPU, else as the checkpoint was saved.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto: the GPU where there is one.")]
Tree = Annotated[
    str | None,
    typer.Option(
        help="Draft tree: chain:DEPTH, comb:DEPTH[,WIDTH], dynamic:NODES,DEPTH,TOP_K, static[:NODES], sampled:2,2,1 "
        "(default: the head's)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Count = Annotated[int, typer.Option(min=1)]


def _print_version(wanted: bool) -> None:
    if wanted:
        import specheads

        print(f"specheads {specheads.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar=DEBUG, help="Show a traceback on errors.")] = False,
) -> None:
    """Train draft heads for a frozen language model and decode with them: the same text, several times faster.

    \b
    Examples:
      specheads demo
      specheads generate checkpoints/eagle3 --prompt "def fibonacci(n):" --color-depth
      specheads train recipes/eagle3.yaml data.train=my.jsonl
      specheads evaluate checkpoints/eagle3 --num-prompts 8
      specheads calibrate out/head --data own.jsonl --save
      specheads info checkpoints/eagle3
    """


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.01, help="Of live training.")] = 2.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts out of the held-out files.")] = 6,
    max_new_tokens: NewTokens = 96,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    checkpoints: Annotated[Path | None, typer.Option(help="Where base/ and the heads are (default: shipped).")] = None,
    output: Annotated[Path, typer.Option(help="Where the head trained here is saved.")] = Path("runs/demo"),
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures there.")] = None,
) -> None:
    """Train a head live, save and restore it, and race it against transformers' generate() and the shipped heads.

    \b
    Examples:
      specheads demo
      specheads demo --minutes 5 --num-prompts 12
      specheads demo --json demo.json
    """
    from specheads.console import make_console
    from specheads.demo import story

    options = story.DemoOptions(
        minutes=minutes, num_prompts=num_prompts, max_new_tokens=max_new_tokens, seed=seed, checkpoints=checkpoints,
        output=output, json=json_path,
    )  # fmt: skip
    if not story.run(options, make_console()):
        raise typer.Exit(1)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; recipes/ has one for each head.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the recipe's.")] = None,
    as_json: Json = False,
) -> None:
    """Train a draft head from a recipe, in this process. For several GPUs: accelerate launch train/heads.py RECIPE.

    \b
    Examples:
      specheads train recipes/eagle3.yaml
      specheads train recipes/medusa.yaml base=Qwen/Qwen3-0.6B data.train=my.jsonl training.output_dir=out
      accelerate launch --config_file recipes/accelerate/ddp.yaml train/heads.py recipes/eagle3.yaml
    """
    if not recipe.is_file():
        raise ValueError(f"{recipe} is not a file; give a recipe such as recipes/eagle3.yaml")
    for override in overrides or []:
        if "=" not in override:
            raise ValueError(f"{override!r} is not KEY=VALUE, such as training.max_steps=100")
    from specheads.launch import LaunchError
    from specheads.recipe import read_recipe
    from specheads.training import prepare

    try:
        prepared = prepare(read_recipe(recipe, overrides or []))
    except LaunchError as error:
        raise ValueError(str(error)) from error
    # The Trainer's logs go where progress goes, so that stdout holds the result alone.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        metrics = prepared.train()
    if as_json:
        emit(metrics)
        return
    print(prepared.summary(metrics))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The prompt (default: what stdin gives).")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling.")] = None,
    tree: Tree = None,
    draft: Annotated[bool, typer.Option("--draft/--no-draft", help="--no-draft: one token a step.")] = True,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    color_depth: Annotated[bool, typer.Option("--color-depth", help="Colour tokens by draft depth.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Generate text with a draft head. The text goes to stdout, the statistics to stderr.

    \b
    Examples:
      specheads generate checkpoints/eagle3 --prompt "def fibonacci(n):" --color-depth
      specheads generate out/head --prompt-file question.txt --chat --temperature 0.7 --seed 1
      cat file.py | specheads generate checkpoints/medusa --tree chain:4 --json
    """
    from specheads.commands import arguments
    from specheads.commands.generate import GenerateOptions, record, show

    text = arguments.read_prompt(prompt, prompt_file)
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, tree=tree,
        draft=draft, chat=chat,
    )  # fmt: skip
    spec, tokenizer = arguments.load(model, base, dtype, device)
    if as_json:
        emit({"model": model, **record(spec, tokenizer, text, options)})
    else:
        show(spec, tokenizer, text, options, stream=stream, color_depth=color_depth)


@app.command()
def evaluate(
    model: Model,
    prompts: Annotated[
        Path | None,
        typer.Option(help=".jsonl ('messages', 'prompt' or 'text') or one prompt a line; default: held-out files."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts that are text into the chat template.")] = False,
    max_new_tokens: NewTokens = 128,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="How many (default: 8, or all of the file).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are over this many.")] = 3,
    tree: Tree = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Measure a head with real decoding: tokens/s, accepted length, acceptance by depth, and is the text the same.

    transformers' generate() and our own loop without drafts run on the same prompts in turn with the head, greedily.
    Rows with 'messages' go through the chat template up to the first turn of the user.
    A token counts as repeated text if the 8 tokens that end with it came up before in the same text.

    \b
    Examples:
      specheads evaluate checkpoints/eagle3
      specheads evaluate out/head --prompts questions.jsonl --max-new-tokens 256 --json > figures.json
      specheads evaluate out/head --prompts questions.txt --chat
    """
    from specheads.bench.prompts import held_out_prompts, prompts_from
    from specheads.commands import arguments
    from specheads.commands.evaluate import measure, show

    if chat and prompts is None:
        raise ValueError("--chat: the held-out files are no chat; give --prompts")
    asked = prompts_from(prompts, num_prompts, chat=chat) if prompts else None
    spec, tokenizer = arguments.load(model, base, dtype, device)
    if asked is None:
        asked = [*held_out_prompts(tokenizer, num_prompts or 8)]
    figures = measure(spec, tokenizer, asked, max_new_tokens=max_new_tokens, repeats=repeats, tree=tree)
    if as_json:
        emit({"model": model, **figures})
    else:
        show(figures)


@app.command()
def calibrate(
    model: Model,
    data: Annotated[
        list[str], typer.Option(help="Rows to count on, as for training: files or a hub id; best the base's own text.")
    ],
    num_nodes: Annotated[int, typer.Option(min=2, help="Nodes of the tree, its root included.")] = 16,
    max_depth: Annotated[int | None, typer.Option(min=1, help="Tokens drafted in a row at most.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows to look at, drawn at random.")] = 512,
    max_length: Annotated[int, typer.Option(min=4, help="Tokens of a row at most.")] = 1024,
    save: Annotated[bool, typer.Option("--save", help="Make it the default tree of the checkpoint.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Find the static tree that suits a head: the drafts whose ranks came up most often on data.

    A larger tree accepts more and costs more to verify: pick the size with `evaluate --tree` or by the table printed.

    \b
    Examples:
      specheads calibrate out/head --data own.jsonl --num-nodes 16 --save
      specheads calibrate out/head --data own.jsonl --num-nodes 64 --max-depth 5 --json
    """
    from specheads.commands import arguments
    from specheads.commands import calibrate as command

    if save and not Path(model).is_dir():
        raise ValueError(f"--save: {model} is not a directory here, so its default tree cannot be written")
    spec, tokenizer = arguments.load(model, base, dtype, device)
    found = command.calibrate(
        spec, tokenizer, data, num_nodes=num_nodes, max_depth=max_depth, max_rows=max_rows, max_length=max_length
    )
    if save:
        command.save(spec, Path(model), found)
    if as_json:
        emit({"model": model, "saved": save, **found})
        return
    command.show(found)
    if save:
        print(f"saved as the default tree of {model}")


@app.command()
def info(
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="A head checkpoint.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a head checkpoint holds; without PATH: versions, devices and the shipped checkpoints.

    \b
    Examples:
      specheads info
      specheads info checkpoints/eagle3
      specheads info out/head --json
    """
    from specheads.commands.info import checkpoint_record, show, system_record

    record = system_record() if path is None else checkpoint_record(path)
    if as_json:
        emit(record)
    else:
        show(record)


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def run(args: Sequence[str] | None = None) -> int:
    """The exit code. Bad input is one line on stderr and 2."""
    given = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    try:
        return int(app(given, prog_name="specheads", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        print("specheads: stopped", file=sys.stderr)
        return 130
    except typer.TyperException as error:
        message = error.format_message()
    except (ValueError, OSError, ImportError) as error:
        if "--debug" in given or os.environ.get(DEBUG):
            raise
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"specheads: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    sys.exit(run())


if __name__ == "__main__":
    main()
