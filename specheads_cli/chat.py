"""specheads chat."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads_cli.app import Assistant, Base, Device, DType, Target, Temperature, Tree, app


@app.command()
def chat(
    model: Target,
    assistant: Assistant = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Treat prompts as turns of a chat, or as text to continue (default: a chat if the "
            "tokenizer has a template).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message that the conversation begins with.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens to generate (default: 128).")
    ] = None,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Sampling seed (default: a new one for each prompt).")] = None,
    accept: Annotated[str, typer.Option(metavar="RULE[:ARGS]", help="Acceptance rule, as in generate.")] = "exact",
    tree: Tree = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="4bit|8bit", help="Load target and draft models in 4 or 8 bits, with bitsandbytes."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="romsto",
            help="Use the defaults of another console. romsto: draft chains of 4, n-grams on and reset between "
            "prompts, 35 tokens, seed 42, each prompt by itself.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt and nothing else.")] = False,
) -> None:
    """Answer prompts with several decoders, and compare them.

    Each prompt is answered by the target alone and by the target with its drafter, one after the other with the same
    seed, and their speed, acceptance and text are compared; /ngram and /drafter add n-grams and the draft model alone.
    /help lists the commands and the settings. The processors filter before they apply the temperature. The conversation
    continues from the first answer. A turn stopped by Ctrl-C is dropped; a second Ctrl-C does not wait for the current
    step. Ctrl-D or /quit leaves.

    In a prompt \\n is a newline and \\t a tab; \\\\n is a backslash and an n. A backslash at the end of a line joins
    it to the next. Three double quotes begin and end a prompt of several lines, which is taken literally and may begin
    with a slash. Tab completes commands and their arguments. In a pipe each line is a prompt or a command: answers go
    to stdout, everything else to stderr, and the exit status is 1 if any line failed.

    \b
    Examples:
      specheads chat out/head
      specheads chat my/model --assistant my/small-model --temperature 0.8 --seed 1
      specheads chat my/model --assistant my/small-model --like romsto --quantize 8bit
      printf '/accept typical\\ndef f(x):\\n' | specheads chat out/head --no-chat --json
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
    console = Console(Session(models, replace(settings, chat=chats, drafter=models.best)), as_json=as_json)
    if code := console.run():
        raise typer.Exit(code)
