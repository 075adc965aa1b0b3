"""What Tab completes in the console: commands, and their values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from specheads.cli.chat.settings import COMMANDS, COMPARABLE, SETTINGS, SWITCH
from specheads.cli.options.decode import VIEWS
from specheads.decoding.acceptance import RULES, divergences
from specheads.decoding.planner import PLANS
from specheads.decoding.registry import positional


def completions(line: str, drafters: Iterable[str]) -> list[str]:
    """The completions of a line's last word, each as the whole word.

    drafters: names that /draft accepts besides checkpoints. A finished word is followed by a space; one that can
    continue (with a rule's or tree's numbers, or a folder's contents) is not.
    """
    if not line.startswith("/"):
        return []
    *before, word = line.split(" ")
    if not before:
        return _whole(word, [f"/{name}" for name in (*SETTINGS, *COMMANDS)])
    name = before[0].removeprefix("/")
    if name == "compare":
        setting, equals, value = word.partition("=")
        if not equals:
            return _starts(word, [f"{each}=" for each in COMPARABLE])
        return [f"{setting}={each}" for each in _values(setting, value, drafters)]
    if len([part for part in before if part]) > 1:
        return []
    return _values(name, word, drafters)


def _values(name: str, word: str, drafters: Iterable[str]) -> list[str]:
    """The values of a setting that begin with the word."""
    if name == "accept":
        return _rules(word)
    if name == "tree":
        return _starts(word, [f"{kind}:" for kind in PLANS])
    if name == "draft":
        return [*_whole(word, [*drafters, "none"]), *_starts(word, ["model:", "cascade:"]), *_folders(word)]
    return _whole(word, {"chat": tuple(SWITCH), "view": VIEWS}.get(name, ()))


def _rules(word: str) -> list[str]:
    kind, colon, rest = word.partition(":")
    if kind == "fuzzy" and colon:
        return [f"fuzzy:{name}:" for name in _starts(rest, [*divergences.NAMES, "random"])]
    return [f"{name}:" if positional(RULES[name]) else f"{name} " for name in _starts(word, RULES)]


def _folders(word: str) -> list[str]:
    """Paths of folders that begin with the word."""
    folder, name = os.path.split(word)
    try:
        entries = [entry.name for entry in Path(folder or ".").expanduser().iterdir() if entry.is_dir()]
    except OSError:
        return []
    visible = [entry for entry in entries if not entry.startswith(".") or name.startswith(".")]
    return [os.path.join(folder, f"{entry}/") for entry in sorted(_starts(name, visible))]


def _starts(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(word)]


def _whole(word: str, names: Iterable[str]) -> list[str]:
    return [f"{name} " for name in dict.fromkeys(_starts(word, names))]
