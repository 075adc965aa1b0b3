"""Options given by name, as recipes, head arguments and files give them: an unknown one is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 24  # known names that one message lists at most


def refuse_unknown(given: Iterable[object], known: Iterable[str], what: str = "option", section: str = "") -> None:
    """ValueError for a name that is not `known`, with the nearest one that is, or what there is where none is near.

    what: names the kind of option in the message; section: stands before each name, "training." say.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1)
        listed = ", ".join(known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
        hint = f"did you mean {section + near[0]!r}?" if near else f"known: {listed}"
        raise ValueError(f"unknown {what} {section + str(name)!r}; {hint}")
