"""Values of a foreign config, each checked when it is read, since the config is untrusted.

An unexpected value is a CheckpointError with its name and the value.
"""

from __future__ import annotations

import sys
from typing import Any

from specheads.models.files import CONFIG, CheckpointError
from specheads.options import shown


def whole(config: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """An integer from a config. CheckpointError if it is not one, is below `least`, or is missing without a default."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a whole number from {least} to 2³¹")
    return value


def real(config: dict[str, Any], name: str, default: float) -> float:
    """A finite positive number from a config. CheckpointError if it is anything else."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected a number above 0")
    return float(value)


def flag(config: dict[str, Any], name: str, default: bool = False) -> bool:
    """A boolean from a config. CheckpointError if it is anything else."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{CONFIG} has {name}={shown(value)}; expected true or false")
    return value


def table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A table inside a config, empty if missing. CheckpointError if it is anything else."""
    value = config.get(name)
    if value is None:
        return {}
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
