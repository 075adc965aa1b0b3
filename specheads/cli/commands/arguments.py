"""The prompt and the draft tree of a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specheads.decoding.planner import Plan, as_plan


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of --prompt, --prompt-file or stdin. ValueError if there is none, or more than one."""
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if file is not None:
        try:
            prompt = file.read_text("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        if not prompt:
            raise ValueError(f"{file} is empty: expected the text to continue")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return prompt


def parse_tree(spec: str | None, drafter: Any) -> Plan | None:
    """The plan of --tree for this drafter; None for the drafter's default."""
    try:
        return as_plan(spec, drafter)
    except ValueError as error:
        raise ValueError(f"--{error}") from error  # which names the option: tree 'bush'…
