"""specheads chat."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads_cli.app import Assistant, Base, Device, DType, Target, Tree, app


@app.command()
def chat(
    model: Target,
    assistant: Assistant = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Prompts are turns of a chat, or text to be continued (default: a chat where the "
            "tokenizer has a template).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the conversation begins with.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate at most.", show_default="128")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling (default: a fresh one a prompt).")] = None,
    accept: Annotated[str, typer.Option(metavar="RULE[:ARGS]", help="Acceptance rule.")] = "exact",
    tree: Tree = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="4bit|8bit", help="The target and draft models in 4 or 8 bits, through bitsandbytes."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="romsto",
            help="The defaults of another console. romsto: draft chains of 4, n-grams on and reset between prompts, "
            "35 tokens, seed 42, each prompt by itself.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a prompt, and nothing else.")] = False,
) -> None:
    """Answer prompts in several ways of decoding, streaming each, and compare: speed, acceptance, is the text the same.

    Every prompt is answered by the target alone and by the target with its drafter, and if switched on with n-grams
    and by the draft model alone: with one seed, one after another. /help lists the commands, and what is set. The
    processors filter before they apply the temperature. The first answer goes on in the conversation; of a turn that
    Ctrl-C stopped, nothing does. Ctrl-C twice does not wait for the step at hand. Ctrl-D or /quit leaves.

    In a prompt \\n is a newline and \\t a tab; \\\\n is a backslash and an n. A backslash at the end of a line carries
    on in the next. Three double quotes begin and end a prompt of several lines, which may begin with a slash and is
    taken as it is. Tab completes commands and their arguments. In a pipe each line is a prompt or a command: answers
    go to stdout, all else to stderr.

    \b
    Examples:
      specheads chat checkpoints/eagle3
      specheads chat my/model --assistant my/small-model --temperature 0.8 --seed 1
      specheads chat my/model --assistant my/small-model --like romsto --quantize 8bit
      printf '/accept typical\\ndef f(x):\\n' | specheads chat checkpoints/eagle3 --no-chat --json
    """
    from dataclasses import replace

    from specheads.cli.chat.console import Console
    from specheads.cli.chat.session import Session
    from specheads.cli.chat.settings import Processor, settings_like
    from specheads.models.named import Models

    settings = settings_like(
        like, length=max_new_tokens, processor=Processor("multinomial", temperature) if temperature else None,
        seed=seed, system=system, accept=accept, tree=tree,
    )  # fmt: skip
    models = Models.load(model, assistant=assistant, base=base, dtype=dtype, device=device, quantize=quantize)
    chats = bool(models.tokenizer.chat_template) if template is None else template
    Console(Session(models, replace(settings, chat=chats, drafter=models.best)), as_json=as_json).run()
