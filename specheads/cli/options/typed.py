"""The shared options as types, for the commands that spell their parameters out: bench."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.options.shared import Output, Placement

_FIELDS = {**Placement.__dataclass_fields__, **Output.__dataclass_fields__}
_JSON, _DTYPE, _DEVICE, _BASE = (dict(_FIELDS[name].metadata) for name in ("as_json", "dtype", "device", "base"))
Json = Annotated[bool, typer.Option(*_JSON.pop("flags"), **_JSON)]
DType = Annotated[str, typer.Option(**_DTYPE)]
Device = Annotated[str, typer.Option(**_DEVICE)]
Base = Annotated[str | None, typer.Option(**_BASE)]
