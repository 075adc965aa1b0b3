"""A generated text as an SVG picture, each token in the colour of where it came from: rich's console export.

It asks for no font and no other file, and is light or dark as its reader's screen is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from specheads import pictures, terminal
from specheads.cli.text import depth_style, legend
from specheads.decoding.drafters.retokenize import TextPieces

_WIDTH = 80  # columns
_FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; white-space: pre}}
LIGHT@media(prefers-color-scheme: dark) {{DARK}}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect class="{unique_id}-page" width="100%" height="100%" rx="8"/>
<g transform="translate({terminal_x}, 24)" clip-path="url(#{unique_id}-clip-terminal)">
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def text_svg(prompt: str, tokens: Sequence[int], depths: Sequence[int], steps: int, tokenizer: Any) -> str:
    """The prompt in grey, then the tokens by their draft depths (0: the model's own), the legend, and the counts."""
    pieces, shown = TextPieces(tokenizer), Text(terminal.printable(prompt), style="bright_black")
    for i, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
        piece = pieces.add(token, last=i == len(tokens) - 1)
        shown.append(terminal.printable(piece), depth_style(depth) or "white")
    counts = f"{len(tokens)} tokens in {steps} passes of the model: {len(tokens) / steps:.2f} tokens a pass"
    lines = (shown, Text(), legend(), Text(counts))
    light, dark = (_exported(lines, look, "{styles}") for look in (pictures.LIGHT, pictures.DARK))
    form = _FORMAT.replace("LIGHT", _literal(light)).replace("DARK", _literal(dark))
    return _exported(lines, pictures.LIGHT, form)


def _exported(lines: Sequence[Text], look: pictures.Look, form: str) -> str:
    """form: as rich's `code_format`; of "{styles}" alone come the style sheet's rules, with the page's."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        console.print(line)
    text = console.export_svg(theme=_theme(look), code_format=form, unique_id="text", title="")
    page = f".text-page {{fill: {look.page}}}\n"
    return text + page if form == "{styles}" else text


def _theme(look: pictures.Look) -> TerminalTheme:
    """The colours of a terminal: those by which depths are told apart are the pictures'."""
    blue, red, green, magenta, yellow, cyan, _, purple = map(_rgb, look.colors)
    page, ink, soft = map(_rgb, (look.page, look.ink, look.soft))
    return TerminalTheme(
        page, ink, [page, red, green, yellow, blue, magenta, cyan, ink],
        [soft, purple, green, yellow, blue, magenta, cyan, ink],
    )  # fmt: skip


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _literal(text: str) -> str:
    """The text as str.format() gives it back."""
    return text.replace("{", "{{").replace("}", "}}")
