"""The console's settings: the fields of `Settings`, each changed by a command of its name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from specheads.cli.chat.lines import unescaped
from specheads.cli.options.decode import VIEWS, ChatOptions, Settings
from specheads.options import refuse_unknown
from specheads.terminal import utf8_text

SETTINGS = {field.name: field for field in fields(Settings)}
COMMANDS = {
    "clear": "Forget the conversation, and clear the screen.",
    "help": r"This list. In a prompt \n is a newline, \t a tab, \\n the two characters; between three double quotes "
    "every character is itself.",
    "quit": "Leave (Ctrl-D, too).",
}
DEFAULT = "default"  # the value that resets a setting
TREE_ALONE = f"Without a value it draws the last tree; {DEFAULT} resets it."
SWITCH = {"on": True, "off": False}
# What answers to the same prompt can differ in.
COMPARABLE = tuple(name for name in SETTINGS if name not in ("chat", "system", "seed", "compare", "view"))
_TYPES = get_type_hints(Settings)


def change(options: ChatOptions, name: str, text: str) -> ChatOptions:
    """The options after `/name text`; a setting without a text, or with `default`, is reset. ValueError for a bad
    value."""
    field, text = SETTINGS[name], text.strip()
    new: dict[str, Any] = {name: field.default if text in ("", DEFAULT) else _read(text, name)}
    changed = replace(options, **new)
    if name == "compare":
        compared(changed)
    return changed


def compared(options: ChatOptions) -> list[tuple[str, ChatOptions]]:
    """The options of each further answer to a prompt, after their text. ValueError for a bad `compare`.

    A setting that is named a second time begins the next answer: draft=head draft=lookup are two. A drafter that is
    named has its own tree and the exact rule, unless they are named with it."""
    answers: list[dict[str, str]] = []
    for word in (options.compare or "").split():
        name, equals, text = word.partition("=")
        refuse_unknown([name], COMPARABLE, "setting")
        if not equals:
            raise ValueError(f"{word!r} is not NAME=VALUE, such as draft=none")
        if not answers or name in answers[-1]:
            answers.append({})
        answers[-1][name] = text
    ways = []
    for settings in answers:
        changed = replace(options, tree=None, accept=None) if "draft" in settings else options
        for name, text in settings.items():
            changed = change(changed, name, text)
        ways.append((" ".join(f"{name}={text}" for name, text in settings.items()), changed))
    return ways


def _read(text: str, name: str) -> Any:
    """The value that a text gives a setting. ValueError if it is of another type, or out of range."""
    kinds = [kind for kind in (get_args(_TYPES[name]) or (_TYPES[name],)) if kind is not type(None)]
    if kinds == [bool]:
        if text not in SWITCH:
            raise ValueError(f"{text!r} is neither on nor off")
        return SWITCH[text]
    if kinds == [str]:
        if name == "view":
            refuse_unknown([text], VIEWS, "view")
        return utf8_text(unescaped(text), "the system message") if name == "system" else text
    try:
        value = kinds[0](text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kinds == [int] else ''}number") from None
    least, most = (SETTINGS[name].metadata.get(bound) for bound in ("min", "max"))
    if not (least is None or value >= least) or not (most is None or value <= most) or value == float("inf"):
        limits = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise ValueError(f"{name} {text} must be {limits}")
    return value


def written(value: Any) -> str:
    """A setting's value as it is typed."""
    if value is None:
        return "–"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
