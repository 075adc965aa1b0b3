"""The ways to name a head, as convert(), recipes and checkpoints do → its config."""

from __future__ import annotations

from typing import Any

from specheads.heads import HEADS, HeadConfig
from specheads.options import shown


def head_kind(name: object) -> str:
    if not isinstance(name, str) or name not in HEADS:
        raise ValueError(f"unknown head {shown(name)}; known: {', '.join(HEADS)}")
    return name


def head_config(head: str | HeadConfig | list[Any], options: dict[str, Any]) -> HeadConfig:
    """The config that convert()'s ways of naming a head come to."""
    if isinstance(head, list):
        if len(head) != 1 or not isinstance(head[0], tuple | list) or len(head[0]) != 2:
            raise ValueError(
                f"a head list is [(name, options)] with one entry, not {head!r}; convert again for a second head"
            )
        name, listed = head[0]
        head, options = name, {**listed, **options}
    if isinstance(head, HeadConfig):
        if options:
            raise ValueError(f"options {sorted(options)} next to a head config; put them into the config")
        return head
    return HEADS[head_kind(head)].Config.from_options(options)
