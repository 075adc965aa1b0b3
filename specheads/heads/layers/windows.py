"""Sliding windows of a head's decoder blocks: the options of any head with attention, and a mask for each block.

A block with a window of w attends to the last w positions, its own included, in training as in decoding: a drafted
token counts like any other. Caches keep every position, because a rejected draft takes positions back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from specheads.decoding.verify.masks import Reach
from specheads.options import shown

T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"


def check_windows(kind: str, window: int | None, types: Sequence[str] | None, blocks: int) -> None:
    """ValueError unless the options describe `blocks` blocks. types: FULL or SLIDING for each; None: all alike."""
    if types is None:
        return
    said = f"{kind} head option layer_types={shown(list(types))}"
    if any(each not in (FULL, SLIDING) for each in types):
        raise ValueError(f"{said}: each must be {FULL!r} or {SLIDING!r}")
    if len(types) != blocks:
        raise ValueError(f"{said} names {len(types)} blocks, and the head has {blocks}")
    if SLIDING in types and window is None:
        raise ValueError(f"{said}: give sliding_window too, the size of the window")
    if SLIDING not in types and window is not None:
        raise ValueError(f"{said} and sliding_window={window}: no block has the window; leave one of them out")


def block_reaches(window: int | None, types: Sequence[str] | None, blocks: int) -> tuple[Reach, ...]:
    """How far back each block looks. Without types, every block has the window, if there is one."""
    if window is None:
        return (Reach(),) * blocks
    near = Reach("sliding", window)
    return tuple(near if each == SLIDING else Reach() for each in types or (SLIDING,) * blocks)


def for_each_block(reaches: Sequence[Reach], make: Callable[[Reach], T]) -> list[T]:
    """make(reach) for each block, called once for blocks that look equally far."""
    made = {reach: make(reach) for reach in dict.fromkeys(reaches)}
    return [made[reach] for reach in reaches]


def attended_steps(steps: Sequence[T], reach: Reach) -> tuple[T, ...]:
    """Of one entry for each unrolled step so far, those that the next step attends: step 0, whose mask says which of
    its positions, and the later ones, each at one position, that the window holds."""
    first = max(1, len(steps) + 1 - reach.size) if reach.kind == "sliding" else 1
    return (*steps[:1], *steps[first:])
