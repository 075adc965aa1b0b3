"""A task with exact answers from shipped data: repeat the parameters of a function of the held-out standard library.

The prompt is the beginning of a function in a held-out file and, below it, `def NAME(` again. The right answer is its
parameter list, compared without white space. The shipped base gets about half of them right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from specheads.bench.prompts import evenly_spaced
from specheads.data import corpus

SHOWN = 64  # tokens of the function that the prompt shows
SHORTEST, LONGEST = 6, 12  # tokens of a parameter list; a shorter one is usually just `self`


def signature_questions(tokenizer: Any, count: int) -> list[tuple[list[int], str]]:
    """`count` pairs of prompt ids and parameter list, evenly spaced over all there are, the same for the same files.

    ValueError if there are fewer.
    """
    usable = []
    for _, text in corpus.texts("held_out"):
        for head, parameters, source in functions(text):
            if SHORTEST <= len(tokenizer(parameters)["input_ids"]) <= LONGEST:
                usable.append((head, parameters, source))
    if len(usable) < count:
        raise ValueError(
            f"{count} signatures asked for, but the held-out files have {len(usable)} that are long enough"
        )
    questions = []
    for head, parameters, source in evenly_spaced(usable, count):
        shown = tokenizer(source)["input_ids"][:SHOWN]
        questions.append(
            ([*shown, *tokenizer("\n\n" + head, add_special_tokens=False)["input_ids"]], plain(parameters))
        )
    return questions


def functions(text: str) -> Iterator[tuple[str, str, str]]:
    """For each function in a file: `    def NAME(`, what follows up to the colon before its body, and its source.

    None from a file that this Python cannot parse or that is not ASCII, since ast counts columns in bytes."""
    try:
        module = ast.parse(text)
    except SyntaxError:
        return
    if not text.isascii():
        return
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef):
            continue
        start, body = starts[node.lineno - 1], node.body[0]
        head = f"{' ' * node.col_offset}def {node.name}("
        if text.startswith(head, start) and node.end_lineno and node.end_col_offset is not None:
            written = signature_written(text[start + len(head) : starts[body.lineno - 1] + body.col_offset])
            if written is not None:
                end = starts[node.end_lineno - 1] + node.end_col_offset
                whole = text[start + len(head) : end]
                yield head, whole[: len(_until_colon(whole) or "")], text[start:end]


def signature_written(text: str) -> str | None:
    """The parameters and annotations after `def NAME(` up to the colon that ends them, without white space; None if
    there is no such colon."""
    written = _until_colon(text)
    return None if written is None else plain(written)


def plain(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _until_colon(text: str) -> str | None:
    """The text up to and including the colon outside all brackets; one bracket is open at its start."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == ":" and depth == 0:
            return text[: i + 1]
    return None
