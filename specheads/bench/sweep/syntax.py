"""A task with exact answers and longer texts from shipped data: continue a function so that Python can parse it.

The prompt is the first lines of a function in a held-out file. A completion is right if none of its complete lines
breaks Python's grammar. Nothing is run.
"""

from __future__ import annotations

import codeop
import warnings
from typing import Any

from specheads.bench.prompts import evenly_spaced
from specheads.bench.sweep.signatures import functions
from specheads.data import corpus

SHOWN = 64  # most tokens of the function that the prompt shows, in whole lines
LEFT = 24  # fewest tokens that the function has beyond SHOWN
ALLOW_INCOMPLETE = codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]  # known to consoles


def syntax_questions(tokenizer: Any, count: int) -> list[tuple[str, str]]:
    """`count` pairs of a prompt and the blocks around it (see `blocks`), evenly spaced over all there are, the same for
    the same files.

    ValueError if there are fewer.
    """
    usable = []
    for _, text in corpus.texts("held_out"):
        for head, _, source in functions(text):
            indent = len(head) - len(head.lstrip())
            lines = source.splitlines(keepends=True)
            shown = beginning(tokenizer, lines, blocks(indent))
            # Code has fewer than 12 characters per token.
            if shown and len(tokenizer(source[: 12 * (SHOWN + LEFT)])["input_ids"]) >= SHOWN + LEFT:
                usable.append((shown, blocks(indent)))
    if len(usable) < count:
        raise ValueError(f"{count} functions asked for, but the held-out files have {len(usable)} that are long enough")
    return evenly_spaced(usable, count)


def beginning(tokenizer: Any, lines: list[str], around: str) -> str | None:
    """The first lines of a function, at most SHOWN tokens; None if they end inside a statement or string, or contain
    only the definition line."""
    shown, number = "", 0
    for line in lines:
        if len(tokenizer(shown + line)["input_ids"]) > SHOWN:
            break
        shown, number = shown + line, number + 1
    if number < 2 or number == len(lines) or not lines[number].strip():
        return None
    indent = len(lines[number]) - len(lines[number].lstrip())
    return shown if compiles(f"{around}{shown}{' ' * indent}pass\n") else None


def blocks(indent: int) -> str:
    """Lines that open a block at every fourth column before `indent`, so that an indented part of a file parses."""
    return "".join(" " * column + "if True:\n" for column in range(0, indent, 4))


def parses(prompt: str, completion: str, around: str) -> bool:
    """Can Python parse the complete lines of prompt and completion? around: lines that open the blocks around them."""
    text = prompt + completion
    return compiles(around + text[: text.rfind("\n") + 1], ALLOW_INCOMPLETE)


def compiles(text: str, flags: int = 0) -> bool:
    """Is the text a valid program or, with ALLOW_INCOMPLETE, the beginning of one? It is not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about code that a model wrote
        try:
            compile(text, "<written>", "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            return bool(flags) and "incomplete input" in str(error)
        except (ValueError, RecursionError, MemoryError):  # null characters, or nesting that is too deep
            return False
    return True
