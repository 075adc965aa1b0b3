"""What Tab completes in the console: commands, and the arguments of each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from specheads.cli.chat.settings import COMMANDS
from specheads.decoding.acceptance import RULES, divergences
from specheads.decoding.planner import PLANS
from specheads.decoding.registry import positional


def completions(line: str, drafters: Iterable[str]) -> list[str]:
    """The completions of a line's last word, each as the whole word.

    drafters: names that /drafter accepts besides checkpoints. A finished word is followed by a space; one that can
    continue (with a rule's or tree's numbers, or a folder's contents) is not.
    """
    if not line.startswith("/"):
        return []
    *before, word = line.split(" ")
    if not before:
        return [f"{name} " for name in _beginning(word, [f"/{name}" for name in COMMANDS])]
    name, index = before[0].removeprefix("/"), len([part for part in before[1:] if part])
    if name == "accept" and not index:
        return _rules(word)
    if name == "tree" and not index:
        return [*_beginning(word, [f"{kind}:" for kind in PLANS]), *_whole(word, ["default"])]
    if name == "drafter" and not index:
        return [*_whole(word, [*drafters, "on", "off"]), *_folders(word)]
    if name not in COMMANDS or index >= len(COMMANDS[name].words):
        return []
    return _whole(word, COMMANDS[name].words[index])


def _rules(word: str) -> list[str]:
    kind, colon, rest = word.partition(":")
    if kind == "fuzzy" and colon:
        return [f"fuzzy:{name}:" for name in _beginning(rest, [*divergences.NAMES, "random"])]
    return [f"{name}:" if positional(RULES[name]) else f"{name} " for name in _beginning(word, RULES)]


def _folders(word: str) -> list[str]:
    """Paths of folders that begin with the word."""
    folder, name = os.path.split(word)
    try:
        found = [entry for entry in Path(folder or ".").expanduser().iterdir() if entry.is_dir()]
    except OSError:
        return []
    shown = [entry.name for entry in found if not entry.name.startswith(".") or name.startswith(".")]
    return [os.path.join(folder, f"{own}/") for own in sorted(_beginning(name, shown))]


def _beginning(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(word)]


def _whole(word: str, names: Iterable[str]) -> list[str]:
    return [f"{name} " for name in dict.fromkeys(_beginning(word, names))]
