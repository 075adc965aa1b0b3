"""Options given by name, as recipes, head arguments and files give them: an unknown one is refused by name, and what a
message quotes is shortened, since a file may be a stranger's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_LISTED = 24  # known names that one message lists at most
_LONGEST = 80  # characters of a value, or a name, that a message quotes


def refuse_unknown(given: Iterable[object], known: Iterable[str], what: str = "option", section: str = "") -> None:
    """ValueError for a name that is not `known`, with the nearest one that is, or what there is where none is near.

    what: names the kind of option in the message; section: stands before each name, "training." say.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1) if len(str(name)) <= _LONGEST else []
        listed = ", ".join(known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
        hint = f"did you mean {section + near[0]!r}?" if near else f"known: {listed}"
        raise ValueError(f"unknown {what} {shown(section + str(name))}; {hint}")


def shown(value: object) -> str:
    """A value as a message quotes it, by its repr: one line, of 80 characters at most."""
    return shortened(value, quoted=repr)


def shortened(name: object, most: int = _LONGEST, quoted: Callable[[object], str] = str) -> str:
    """A name as a message quotes it without quotation marks: one line, of `most` characters at most."""
    try:
        text = quoted(name)
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        text = f"a {type(name).__name__} that is too large to show"
    start = text[: most + 1]
    start = start if start.isprintable() else repr(start)[1:-1]
    return start if len(start) <= most else start[: most - 1] + "…"


def reason(error: object) -> str:
    """What another's error says, on one line of 300 characters at most."""
    return shortened(" ".join(str(error)[:2000].split()), 300)


def listing(names: Iterable[str], most: int = 6, quoted: Callable[[str], str] = shortened) -> str:
    """The first of the names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quoted, names[:most])) + more
