"""A foreign config is untrusted: values are checked when they are read, and an option that nobody reads is refused.

An unexpected value is a CheckpointError with its name and the value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from specheads.models.files import CONFIG, CheckpointError
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


def _same(first: object, other: object) -> bool:
    try:
        return isinstance(first, bool) == isinstance(other, bool) and first == other
    except RecursionError:  # nested deeper than any option
        return False


def _value(config: dict[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)  # null counts as missing
    return default if value is None else value


def whole(config: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """An integer from a config. CheckpointError if it is not one, is below `least`, or is missing without a default."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a whole number from {least} to 2³¹")
    return value


def real(config: dict[str, Any], name: str, default: float) -> float:
    """A finite positive number from a config. CheckpointError if it is anything else."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a number above 0")
    return float(value)


def flag(config: dict[str, Any], name: str, default: bool = False) -> bool:
    """A boolean from a config. CheckpointError if it is anything else."""
    value = _value(config, name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected true or false")
    return value


def agreed(where: object, flags: dict[str, bool]) -> bool:
    """A flag that several keys give, false without any. CheckpointError if they contradict each other."""
    if len(set(flags.values())) > 1:
        every = ", ".join(f"{name}={quoted(value)}" for name, value in flags.items())
        raise CheckpointError(f"{where}: its config says {every}; its readers would disagree")
    return any(flags.values())


def table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A table inside a config, empty if missing. CheckpointError if it is anything else."""
    value = _value(config, name, {})
    if not isinstance(value, dict):
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a table of options")
    return value


def wholes(config: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """A list of integers from a config; None if missing. CheckpointError if it is anything else."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > 64 or any(type(i) is not int or abs(i) > 2**31 for i in value):
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a list of layer numbers")
    return tuple(value)


def architectures(config: dict[str, Any]) -> list[str]:
    """The classes that a config names; [] if it names none."""
    value = config.get("architectures")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
