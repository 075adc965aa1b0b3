"""specheads evaluate, parity, calibrate."""

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
    Model,
    NewTokens,
    Target,
    Tree,
    app,
    emit,
)


@app.command()
def evaluate(
    model: Target,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: .jsonl ('messages', 'prompt' or 'text'), or one prompt per line (default: held-out "
            "source files)."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Format text prompts with the chat template.")] = False,
    max_new_tokens: NewTokens = 128,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts (default: 8, or all of the file).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts at a time; with 2 or more a row that ends takes the next prompt.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; each prompt batch counts with its median.")] = 3,
    tree: Tree = None,
    accept: Accept = None,
    assistant: Assistant = None,
    draft: Drafts = None,
    k_matrix: KMatrix = None,
    leniency: Leniency = 1.0,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Measure a drafter with real decoding.

    The tables show tokens/s, accepted length, and whether the text is the same. The drafter takes turns with
    transformers' generate() and with our own loop without drafts, greedily on the same prompts. With --accept it also
    runs under that rule, beside the exact one. Rows with 'messages' go through the chat template up to the user's first
    turn. A token counts as repeated text if the 8 tokens that end with it occurred before in the same text.

    \b
    Examples:
      specheads evaluate out/head
      specheads evaluate out/head --prompts questions.jsonl --max-new-tokens 256 --json > figures.json
      specheads evaluate out/head --prompts questions.txt --chat --batch-size 8
      specheads evaluate google/flan-t5-large --assistant google/flan-t5-small --prompts questions.txt
    """
    from specheads.bench.prompts import held_out_prompts, prompts_from
    from specheads.cli.commands.draft_options import DraftOptions
    from specheads.cli.commands.evaluate import measure, show
    from specheads.decoding.acceptance import rule_named
    from specheads.models.named import Models

    if chat and prompts is None:
        raise ValueError("--chat: the held-out files are not chats; give --prompts")
    rule = None if accept is None else rule_named(accept)
    asked = prompts_from(prompts, num_prompts, chat=chat) if prompts else None
    chosen = DraftOptions(assistant, draft, k_matrix, leniency)
    models = Models.load(model, assistant=assistant, base=base, dtype=dtype, device=device)
    name, drafts = chosen.drafter(models)
    if name is None or drafts is None:
        raise ValueError("--draft none: there is no drafter to measure; name one")
    if asked is None:
        asked = [*held_out_prompts(models.tokenizer, num_prompts or 8)]
    figures = measure(
        models, name, drafts, asked, max_new_tokens=max_new_tokens, repeats=repeats, tree=tree, rule=rule,
        batch_size=batch_size,
    )  # fmt: skip
    if as_json:
        emit({"model": model, **figures})
    else:
        show(figures)


@app.command()
def parity(
    model: Model,
    data: Annotated[list[str], typer.Option(help="Rows the head was not trained on: file, glob or hub id.")],
    prompts: Annotated[int, typer.Option(min=1, help="Number of rows whose prompts are decoded.")] = 8,
    max_new_tokens: NewTokens = 64,
    max_length: Annotated[int, typer.Option(min=2, help="Maximum tokens per row.")] = 2048,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference that passes.")] = 0.02,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Compare real decoding's accepted length with training's.

    Training's is what its forward computes for the text that was decoded. Training runs this at its end, if the model
    is whole on one process. The exit status is 3 if the two differ.

    \b
    Examples:
      specheads parity out/head --data my.jsonl
      specheads parity out/head --data held_out.jsonl --dtype bfloat16 --tolerance 0.05
    """
    from specheads.data.config import DataConfig
    from specheads.data.datasets import build_datasets
    from specheads.decoding.verify.hf_base import text_config
    from specheads.models.named import load_with_tokenizer
    from specheads.terminal import make_console, table
    from specheads.training.parity import ParityConfig, compare, prompts_of

    config = ParityConfig(prompts, max_new_tokens=max_new_tokens, tolerance=tolerance)
    loaded, tokenizer = load_with_tokenizer(model, base, dtype, device)
    wanted = DataConfig(train=data, max_length=max_length, max_samples=prompts)
    rows, _ = build_datasets(wanted, tokenizer, text_config(loaded.base).vocab_size)
    found = compare(loaded, prompts_of(rows, config), config)
    if found is None:
        raise ValueError("the base answered every prompt with a single token: give other rows")
    if as_json:
        emit({**vars(found), "holds": found.holds})
    else:
        out = make_console()
        out.print(
            table("Accepted length (tokens per step, including the base's own)", ("", "tokens/step"), found.rows())
        )
        out.print(found.verdict)
    if not found.holds:
        raise typer.Exit(3)


@app.command()
def calibrate(
    model: Model,
    data: Annotated[
        list[str],
        typer.Option(help="Rows to count ranks on, as for training: files or a hub id; best is the base's own text."),
    ],
    num_nodes: Annotated[int, typer.Option(min=2, max=1024, help="Nodes of the tree, including its root.")] = 16,
    max_depth: Annotated[int | None, typer.Option(min=1, help="Maximum depth of the tree, in drafted tokens.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum rows to read, drawn at random.")] = 512,
    max_length: Annotated[int, typer.Option(min=4, help="Maximum tokens per row.")] = 1024,
    save: Annotated[bool, typer.Option("--save", help="Make it the default tree of the checkpoint.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Find the static tree that suits a head.

    It holds the drafts that were right most often on data. A larger tree accepts more and costs more to verify: choose
    the size by the printed table or with `evaluate --tree`.

    \b
    Examples:
      specheads calibrate out/head --data my.jsonl --num-nodes 16 --save
      specheads calibrate out/head --data my.jsonl --num-nodes 64 --max-depth 5 --json
    """
    from specheads.cli.commands import calibrate as command
    from specheads.models.checkpoint import save_default_tree
    from specheads.models.named import load_with_tokenizer

    if save and not Path(model).is_dir():
        raise ValueError(f"--save: {model} is not a directory here, so its default tree cannot be written")
    spec, tokenizer = load_with_tokenizer(model, base, dtype, device)
    found = command.calibrate(
        spec, tokenizer, data, num_nodes=num_nodes, max_depth=max_depth, max_rows=max_rows, max_length=max_length
    )
    if save:
        save_default_tree(model, found["tree"])
    if as_json:
        emit({"model": model, "saved": save, **found})
        return
    command.show(found)
    if save:
        print(f"saved as the default tree of {model}")
