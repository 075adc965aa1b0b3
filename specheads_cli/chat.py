"""specheads chat."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads_cli.app import Base, Device, DType, NewTokens, Tree, app


@app.command()
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Head checkpoint or plain Hugging Face model: a directory or hub id.")
    ],
    assistant: Annotated[
        str | None, typer.Option(metavar="SMALL_MODEL", help="A smaller model to draft with, of any vocabulary.")
    ] = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Prompts are turns of a chat, or text to be continued (default: a chat where the "
            "tokenizer has a template).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the conversation begins with.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling (default: a fresh one a prompt).")] = None,
    accept: Annotated[str, typer.Option(metavar="RULE[:ARGS]", help="Acceptance rule.")] = "exact",
    tree: Tree = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a prompt, and nothing else.")] = False,
) -> None:
    """Answer prompts in several ways of decoding, streaming each, and compare: speed, acceptance, is the text the same.

    Every prompt is answered by the target alone and by the target with its drafter, and if switched on with n-grams
    and by the draft model alone: with one seed, one after another. /help lists the commands, and what is set. The
    processors filter before they apply the temperature. The first answer goes on in the conversation; of a turn that
    Ctrl-C stopped, nothing does. Ctrl-C twice does not wait for the step at hand. Ctrl-D or /quit leaves.

    A backslash at the end of a line carries on in the next; three double quotes begin and end a prompt of several
    lines, which may begin with a slash. In a pipe each line is a prompt or a command: answers go to stdout, all else
    to stderr.

    \b
    Examples:
      specheads chat checkpoints/eagle3
      specheads chat my/model --assistant my/small-model --temperature 0.8 --seed 1
      printf '/accept typical\\ndef f(x):\\n' | specheads chat checkpoints/eagle3 --no-chat --json
    """
    from dataclasses import replace

    from specheads.chat.console import Console
    from specheads.chat.models import Models
    from specheads.chat.session import Session
    from specheads.chat.settings import Processor, Settings

    settings = Settings(
        length=max_new_tokens, processor=Processor("multinomial", temperature) if temperature else Processor(),
        seed=seed, system=system, accept=accept, tree=tree,
    )  # fmt: skip
    models = Models.load(model, assistant=assistant, base=base, dtype=dtype, device=device)
    chats = bool(models.tokenizer.chat_template) if template is None else template
    Console(Session(models, replace(settings, chat=chats, drafter=models.best)), as_json=as_json).run()
