"""Streams generated text with each token coloured by its draft depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel

from specheads import terminal
from specheads.decoding.drafters.retokenize import TextPieces
from specheads.decoding.generation.generate import SpecGenerateOutput, generate

# Index is the draft depth; 0 is the target's own token. Deeper drafts share the last style.
DEPTH_STYLES = ("", "green", "cyan", "blue", "magenta", "yellow", "red", "bright_red")


def depth_style(depth: int) -> str:
    return DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)]


def legend() -> Text:
    """One line with the colour of each draft depth."""
    line = Text("the model's own token", style=DEPTH_STYLES[0])
    line.append("   accepted drafts at depth")
    for depth in range(1, len(DEPTH_STYLES)):
        more = "+" if depth == len(DEPTH_STYLES) - 1 else ""
        line.append(f" {depth}{more}", style=DEPTH_STYLES[depth])
    return line


class TokenStream:
    """A streamer for generate() that prints one row's text step by step, each token in the style of its draft depth.

    After generate(), call close() with the number of accepted drafts of the last step. A step's last token is the
    target's own unless the text stopped at a draft, and that is only known when the steps are complete.
    """

    def __init__(
        self, console: Console, tokenizer: Any, *, colored: bool, prompt: str = "",
        status: terminal.StatusLine | None = None,
    ) -> None:  # fmt: skip
        """prompt: printed just before the first token, so after any log lines of the first step. status: shows the pace
        so far, after each step."""
        self.console, self.colored, self.prompt, self.status = console, colored, prompt, status
        self.began, self.steps = time.perf_counter(), 0
        self.pieces = TextPieces(tokenizer)
        self.prompt_seen = False
        self.held: int | None = None
        self.depths: list[int] = []

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # Hugging Face puts the prompt first
            self.prompt_seen = True
            return
        self._flush(0)
        *drafted, self.held = value.flatten().tolist()
        for depth, token in enumerate(drafted, start=1):
            self.show(token, depth)
        self.drafted, self.steps = len(drafted), self.steps + 1
        if self.status is not None:
            count = len(self.depths) + 1
            self.status.update(
                f"{count} token{'s' * (count != 1)}  {count / (time.perf_counter() - self.began):.1f} tokens/s  "
                f"{count / self.steps:.2f} tokens a step"
            )

    def end(self) -> None:
        """Part of the streamer protocol; the held token waits for close()."""

    def close(self, accepted: int) -> None:
        self._flush(accepted if self.held is not None and accepted > self.drafted else 0, last=True)

    def _flush(self, depth: int, *, last: bool = False) -> None:
        if self.held is not None:
            self.show(self.held, depth, last=last)
            self.held = None

    def show(self, token: int, depth: int, *, last: bool = False) -> None:
        self.depths.append(depth)
        if self.prompt:
            terminal.write(self.console, self.prompt, "bright_black")
            self.prompt = ""
        terminal.write(self.console, self.pieces.add(token, last=last), depth_style(depth) if self.colored else "")


def depth_counts(depths: Sequence[int]) -> str:
    """A line such as `61 of 96 tokens were accepted drafts: 40 at depth 1, 21 at depth 2`, with the legend's depths."""
    deepest = len(DEPTH_STYLES) - 1
    drafted = [min(d, deepest) for d in depths if d]
    each = ", ".join(f"{drafted.count(d)} at depth {d}{'+' if d == deepest else ''}" for d in sorted(set(drafted)))
    return f"{len(drafted)} of {len(depths)} tokens were accepted drafts" + (f": {each}" if each else "")


def write_text(
    out: Console, base: PreTrainedModel, tokenizer: Any, prompt: str, inputs: dict[str, Any], *, live: bool,
    **arguments: Any,
) -> tuple[SpecGenerateOutput, list[int]]:  # fmt: skip
    """Stream the text that `base` generates after `prompt` → generate()'s output, and the draft depth of each token.

    live: tokens are coloured, the pace is shown below the text, and the prompt is printed too, in another colour or,
    without colours, followed by ▶."""
    before = (prompt if terminal.has_colors(out) else prompt + "▶") if live else ""
    with terminal.StatusLine(out, shown=live) as status:
        stream: Any = TokenStream(out, tokenizer, colored=live, prompt=before, status=status)
        try:
            result: Any = generate(base, **inputs, **arguments, streamer=stream, return_dict_in_generate=True)
            stream.close(result.steps[-1].accepted[0])
        finally:
            if stream.depths:  # what follows begins a line of its own
                terminal.write(out, "\n")
    return result, stream.depths
