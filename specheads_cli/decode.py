"""specheads generate, info."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import (
    Accept,
    Assistant,
    Base,
    Device,
    Drafts,
    DType,
    Json,
    KMatrix,
    Leniency,
    NewTokens,
    Target,
    Temperature,
    Tree,
    app,
    emit,
)
from specheads_cli.doctor import doctor


@app.command()
def generate(
    model: Target,
    prompt: Annotated[str | None, typer.Option(help="The prompt (default: read from stdin).")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sampling seed.")] = None,
    tree: Tree = None,
    accept: Accept = None,
    assistant: Assistant = None,
    draft: Drafts = None,
    k_matrix: KMatrix = None,
    leniency: Leniency = 1.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text while it is generated.")] = True,
    color_depth: Annotated[bool, typer.Option("--color-depth", help="Colour tokens by their draft depth.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Format the prompt with the chat template.")] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decoding step: slow at first, then faster.")
    ] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Generate text with a draft head or another drafter. The text goes to stdout, the statistics to stderr.

    \b
    Examples:
      specheads generate out/head --prompt "def fibonacci(n):" --color-depth
      specheads generate out/head --prompt-file question.txt --chat --temperature 0.7 --seed 1
      cat file.py | specheads generate out/head --tree chain:4 --json
      specheads generate out/head --prompt "class A" --accept fuzzy:js:0.2
      specheads generate out/head --prompt "class A" --draft auto:costs.json
      specheads generate google/flan-t5-large --assistant google/flan-t5-small --prompt "Translate to German: a house"
      specheads generate large --prompt "a" --draft cascade:model:small+maxgram --k-matrix [[5,8],[0,8]]
    """
    from specheads.cli.commands import arguments
    from specheads.cli.commands.draft_options import DraftOptions
    from specheads.cli.commands.generate import GenerateOptions, record, show
    from specheads.models.named import Models

    text = arguments.read_prompt(prompt, prompt_file)
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, tree=tree,
        draft=draft != "none", chat=chat, accept=accept, compile=compile,
    )  # fmt: skip
    chosen = DraftOptions(assistant, draft, k_matrix, leniency)
    models = Models.load(model, assistant=assistant, base=base, dtype=dtype, device=device)
    name, drafts = chosen.drafter(models, auto=tree is None and accept is None)
    if as_json:
        emit({"model": model, "drafter": name, **record(models, drafts, text, options)})
    else:
        show(models, drafts, text, options, stream=stream, color_depth=color_depth)


@app.command()
def info(
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="A head checkpoint.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a head checkpoint holds. Without PATH, the same as `specheads doctor`.

    \b
    Examples:
      specheads info
      specheads info out/head
      specheads info out/head --json
    """
    if path is None:
        doctor(network=False, as_json=as_json)
        return
    from specheads.cli.commands.info import checkpoint_record, show

    record = checkpoint_record(path)
    if as_json:
        emit(record)
    else:
        show(record)
