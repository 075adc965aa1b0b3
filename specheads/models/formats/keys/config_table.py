"""A foreign config that records which of its keys are read, so that an option which nobody reads is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specheads.models.files import CheckpointError
from specheads.models.formats.keys.without_effect import ONLY, REASONS, WITHOUT_EFFECT
from specheads.options import shortened, shown


class ConfigTable(dict[str, Any]):
    """A config, or a table inside one. Keys read by get() or [] count as read, and tables inside are ConfigTables too;
    `in`, keys() and items() record nothing."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._read: set[str] = set()
        self._tables: dict[str, ConfigTable] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = super().get(name, default)
        if name not in self or type(value) is not dict:
            return value
        return self._tables.setdefault(name, ConfigTable(value))

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.get(name)

    def unread(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The path and value of each key that was not read; a table's own keys instead of the table."""
        waiting: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self)]
        while waiting:
            above, table = waiting.pop()
            read, tables = (table._read, table._tables) if isinstance(table, ConfigTable) else (set(), {})
            for name, value in table.items():
                if isinstance(value, dict):
                    waiting.append(((*above, name), tables.get(name, value)))
                elif name not in read:
                    yield (*above, name), value

    def refuse_unread(self, where: object, ignores: Callable[[tuple[str, ...]], bool]) -> None:
        """CheckpointError, with its name and value, for a key that was not read and may change what the head drafts.

        ignores: is the key at a path one that does not, beside those of all formats? A key whose value is null counts
        as not there, and so does one in a table that repeats what was read at the top."""
        for path, value in self.unread():
            name = path[-1]
            if value is None or not WITHOUT_EFFECT.keys().isdisjoint(path) or ignores(path):
                continue
            if name in ONLY and _same(value, ONLY[name]):
                continue
            if len(path) > 1 and name in self._read and name in self and _same(value, self[name]):
                continue
            why = next((REASONS[part] for part in path if part in REASONS), None)
            raise refusal(where, ".".join(path), value, why)


def quoted(value: object) -> str:
    """A value as quoted in messages, spelled as in JSON where that is short."""
    return str(value).lower() if isinstance(value, bool) else shown(value)


def refusal(where: object, name: str, value: object, why: str | None = None) -> CheckpointError:
    """The error for an option that heads here do not have."""
    why = why or "if it does not change what the head drafts, take it out of config.json"
    return CheckpointError(
        f"{where}: its head has {shortened(name)}={quoted(value)}, which is not supported yet; {why}"
    )


def _same(one: object, other: object) -> bool:
    try:
        return isinstance(one, bool) == isinstance(other, bool) and one == other
    except RecursionError:  # nested deeper than any option
        return False
