"""Reads the prompt and the draft tree from a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specheads import terminal
from specheads.decoding.planner import Plan, as_plan


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from --prompt, --prompt-file or stdin. ValueError if there is none, or more than one."""
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    source = "--prompt"
    if file is not None:
        try:
            prompt = file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        if not prompt:
            raise ValueError(f"{file} is empty: expected the text to continue")
    if prompt is None and not sys.stdin.isatty():
        prompt, source = sys.stdin.read().removeprefix("\ufeff"), "stdin"
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return terminal.utf8_text(prompt, source)


def parse_tree(spec: str | None, drafter: Any) -> Plan | None:
    """The plan of --tree for this drafter; None for the drafter's default."""
    try:
        return as_plan(spec, drafter)
    except ValueError as error:
        raise ValueError(f"--{error}") from error  # its text begins with the option's name: tree 'bush'…
