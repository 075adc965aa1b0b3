"""The options of generate and chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specheads.cli.complete import complete_words
from specheads.cli.options.shared import MODEL, Drafting, Output, Placement, Sampling
from specheads.options import OptionError, argument, option

VIEWS = ("text", "depth")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Sampling, Drafting, Placement, Output):
    """Generate text with a draft head or another drafter. The text goes to stdout, the statistics to stderr.

    \b
    Examples:
      specheads generate out/head --prompt "def fibonacci(n):" --live
      specheads generate out/head --chat --temperature 0.7 --seed 1 < question.txt
      cat file.py | specheads generate out/head --tree chain:4 --json
      specheads generate out/head --prompt "class A" --accept fuzzy:js:0.2
      specheads generate out/head --prompt "class A" --draft auto:costs.json
      specheads generate google/flan-t5-large --draft model:google/flan-t5-small \\
        --prompt "Translate to German: a house"
      specheads generate large --prompt "a" --draft cascade:model:small+maxgram
    """

    model: str = argument("MODEL", MODEL, named=True)
    prompt: str | None = option(None, "The prompt (default: read from stdin).")
    chat: bool = option(False, "Format the prompt with the chat template.")
    live: bool = option(False, "Colour tokens by where they came from, and show the pace below the text.")
    svg: Path | None = option(None, "Draw the text, its tokens coloured as with --live, as a picture.", metavar="FILE")
    compile: bool = option(False, "Compile the decoding step: slow at first, then faster.")

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise OptionError(
                "{top_p} and {top_k} shape sampling; give {temperature} above 0 with them",
                top_p=..., top_k=..., temperature=...,
            )  # fmt: skip
        for name, meaning in (("tree", "what to draft"), ("accept", "which drafts are accepted")):
            if self.draft == "none" and getattr(self, name) is not None:
                raise OptionError(
                    f"{{{name}}} says {meaning}, and {{draft}} not to draft; give one of them",
                    draft="none", **{name: ...},
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling, Drafting):
    """What a command of the console, /NAME VALUE, can change. chat None: if the tokenizer has a template."""

    chat: bool | None = option(
        None, "Prompts are turns of a conversation, or text to continue (default: a chat if there is a template).",
        flags=("--chat/--no-chat",),
    )  # fmt: skip
    system: str | None = option(None, "System message that the conversation begins with.")
    compare: str | None = option(
        None,
        "Settings under which each prompt is answered once more, with the same seed: draft=none. A name that comes "
        "again begins another answer: draft=head draft=lookup.",
        metavar="NAME=VALUE…",
    )  # fmt: skip
    view: str = option(
        "depth", "text, or depth: tokens are coloured by their draft depth.", autocompletion=complete_words(*VIEWS)
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Settings, Placement, Output):
    """Answer prompts in a console, and compare settings.

    Drafts are chosen as in `generate`. In the console /NAME VALUE changes a setting that has the name of an option
    here, and /help lists all. /compare draft=none answers the last prompt, and each that follows, a second time without
    drafts, with the same seed, and compares speed, acceptance and text; /compare draft=head draft=lookup adds two
    answers, and /compare ends it. /tree draws the last drafted tree, with the model's probabilities and what was
    accepted. A turn stopped by Ctrl-C is dropped; a second Ctrl-C does not wait for the current step. Ctrl-D or /quit
    leaves.

    In a prompt \\n is a newline and \\t a tab; \\\\n is a backslash and an n. A backslash at the end of a line joins
    it to the next. Three double quotes begin and end a prompt of several lines, which is taken literally and may begin
    with a slash. Tab completes commands and their values, and arrow keys go through earlier lines, those of earlier
    sessions too (~/.local/state/specheads/chat_history). In a pipe each line is a prompt or a command: answers go
    to stdout, everything else to stderr, and the exit status is 1 if any line failed.

    \b
    Examples:
      specheads chat out/head
      specheads chat my/model --draft model:my/small-model --temperature 0.8 \\
        --seed 1
      specheads chat my/model --draft model:my/small-model --compare draft=none \\
        --quantize 8bit
      printf '/accept typical\\ndef f(x):\\n' | specheads chat out/head --no-chat \\
        --json
    """

    model: str = argument("MODEL", MODEL, named=True)
    as_json: bool = option(False, "Print one JSON object per prompt and nothing else.", flags=("--json",))
