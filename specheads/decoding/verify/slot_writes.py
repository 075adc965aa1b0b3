"""Writes into a cache's buffers at slots that only the device knows, as custom operations.

torch's compiler keeps a custom operation that is declared to mutate its argument in place, even if that is a view of a
larger tensor. An indexed assignment to such a view becomes two copies of the whole buffer, so that a compiled step
would take longer the longer the text may become. Shapes: B batch rows, P positions, d width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("specheads", "FRAGMENT")


def _move_rows(matrix: Tensor, source: Tensor, destination: Tensor) -> None:
    matrix.index_copy_(0, destination, matrix.index_select(0, source))


def _write_slots(buffer: Tensor, slots: Tensor, new: Tensor) -> None:
    buffer.scatter_(2, slots.expand_as(new), new)


for _name, _arguments, _function in (
    ("move_rows", "Tensor(a!) matrix, Tensor source, Tensor destination", _move_rows),
    ("write_slots", "Tensor(a!) buffer, Tensor slots, Tensor new", _write_slots),
):
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specheads::{_name}", lambda *inputs: None)


def move_rows(matrix: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy rows source (n,) of matrix (M, d) to rows destination (n,); all are read before any is written."""
    torch.ops.specheads.move_rows(matrix, source, destination)


def write_slots(buffer: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new (B, heads, P, d) to slots (B or 1, 1, P, 1) of buffer (B, heads, all slots, d)."""
    torch.ops.specheads.write_slots(buffer, slots, new)
