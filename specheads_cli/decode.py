"""specheads generate, info."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Accept, Base, Device, DType, Json, Model, NewTokens, Tree, app, emit


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
    accept: Accept = None,
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
      specheads generate checkpoints/eagle3 --prompt "class A" --accept fuzzy:js:0.2
    """
    from specheads.commands import arguments
    from specheads.commands.generate import GenerateOptions, record, show

    text = arguments.read_prompt(prompt, prompt_file)
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, tree=tree,
        draft=draft, chat=chat, accept=accept,
    )  # fmt: skip
    spec, tokenizer = arguments.load(model, base, dtype, device)
    if as_json:
        emit({"model": model, **record(spec, tokenizer, text, options)})
    else:
        show(spec, tokenizer, text, options, stream=stream, color_depth=color_depth)


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
