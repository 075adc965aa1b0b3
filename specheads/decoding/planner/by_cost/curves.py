"""Milliseconds of a decoding step, from measured curves: over nodes verified, context length and levels drafted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.options import shown

BLOCK = 64  # tokens of context that share one cost
MAX_MS = 10**9


@dataclass(frozen=True)
class Curve:
    """Milliseconds as a function of a count: non-decreasing, with linear interpolation between points.

    Constant before the first point; extrapolated past the last. ValueError for points that decrease.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a cost curve needs at least one point [count, milliseconds]")
        for (x, y), (next_x, next_y) in zip(self.points, self.points[1:], strict=False):
            if not (x < next_x and y <= next_y):
                raise ValueError(f"a cost curve decreases from {[x, y]} to {[next_x, next_y]}; measure it again")
        if not (self.points[0][0] >= 0 and self.points[0][1] >= 0 and self.points[-1][1] <= MAX_MS):
            points = shown(list(map(list, self.points)))
            raise ValueError(f"a cost curve holds a number below 0 or above {MAX_MS:,} ms: {points}")

    @classmethod
    def fit(cls, measured: Iterable[tuple[float, float]]) -> Curve:
        """The non-decreasing least-squares fit to the measured points (pool adjacent violators)."""
        pools: list[list[float]] = []  # mean, members
        counts = sorted(measured)
        for _, value in counts:
            pools.append([value, 1])
            while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
                mean, members = pools.pop()
                pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * members) / (pools[-1][1] + members),
                             pools[-1][1] + members]  # fmt: skip
        fitted = [mean for mean, members in pools for _ in range(int(members))]
        return cls(tuple((x, y) for (x, _), y in zip(counts, fitted, strict=True)))

    def __call__(self, count: float) -> float:
        points = self.points
        right = bisect_right(points, (count, float("inf")))
        if right == 0 or len(points) == 1:
            return points[0][1]
        (x, y), (next_x, next_y) = points[right - 1 : right + 1] if right < len(points) else points[-2:]
        return y + (count - x) * (next_y - y) / (next_x - x)


@dataclass(frozen=True)
class StepCosts:
    """What a step of `batch` rows costs, in milliseconds.

    verify: context length → curve over the nodes of each row's tree, root included; loop: the rest of the step, over
    the same nodes. read: the drafter's pass over the positions committed since it last drafted, with its first level;
    level: each further level, over the nodes expanded in it; both None without a drafter that takes passes. lookup:
    the search for a copy, over the context length. shapes: nodes expanded in each level → drafting measured as a
    whole, as in a compiled step; `read` then says what more positions add.
    """

    batch: int
    verify: Mapping[int, Curve]
    loop: Curve
    lookup: Curve
    read: Curve | None = None
    level: Curve | None = None
    shapes: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    _steps: dict[tuple[int, int, int], float] = field(init=False, default_factory=dict, repr=False, compare=False)
    _levels: dict[tuple[int, ...], float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch < 1 or not self.verify:
            raise ValueError(f"step costs of batch={self.batch} with {len(self.verify)} verify curves; need 1 of both")
        for length, curve in self.verify.items():
            if not curve.points[0][1] + self.loop.points[0][1] > 0:
                raise ValueError(f"a step after {length} tokens costs 0 ms, by 'verify' and 'loop'; need more than 0")
        for levels, ms in self.shapes.items():
            if not 0 <= ms <= MAX_MS:
                raise ValueError(f"shape {list(levels)} costs {ms} ms; need 0 to {MAX_MS:,}")

    def step(self, rows: int, nodes: int, length: int) -> float:
        """Cost of verifying and committing `nodes` a row after `length` tokens of context. A batch of another size
        costs as much as the same total number of nodes."""
        key = rows, nodes, length // BLOCK
        if key not in self._steps:
            shared = nodes * rows / self.batch
            by_length = Curve.fit((size, curve(shared)) for size, curve in self.verify.items())
            self._steps[key] = by_length(length // BLOCK * BLOCK) + self.loop(shared)
        return self._steps[key]

    def draft(self, rows: int, levels: Sequence[int], positions: int) -> float:
        """Cost of drafting after `positions` unread ones; levels: nodes expanded in each level below the root."""
        if self.read is None or self.level is None:
            return 0.0
        share, key = rows / self.batch, (rows, *levels)
        if key not in self._levels:
            known = self.shapes.get(key[1:]) if share == 1 else None
            sums = sum(self.level(nodes * share) for nodes in levels)
            self._levels[key] = sums if known is None else known - self.read.points[0][1]
        return self.read(positions * share) + self._levels[key]

    def draft_chain(self, rows: int, depth: int, positions: int) -> float:
        """Cost of drafting a chain of `depth` tokens after `positions` unread ones."""
        return self.draft(rows, (1,) * (depth - 1), positions)

    def to_dict(self) -> dict[str, Any]:
        curves = {"loop": self.loop, "lookup": self.lookup, "read": self.read, "level": self.level}
        lists = {name: curve and [[x, round(y, 4)] for x, y in curve.points] for name, curve in curves.items()}
        verify = {str(n): [[x, round(y, 4)] for x, y in curve.points] for n, curve in self.verify.items()}
        shapes = [[list(levels), round(ms, 4)] for levels, ms in self.shapes.items()]
        return {"verify": verify, **lists, "shapes": shapes}

    @classmethod
    def from_dict(cls, batch: int, content: Mapping[str, Any]) -> StepCosts:
        """KeyError, TypeError or ValueError for what `to_dict` did not write."""
        curves = {
            name: None if content[name] is None else _curve(content[name])
            for name in ("loop", "lookup", "read", "level")
        }
        if curves["loop"] is None or curves["lookup"] is None:
            raise ValueError("the curves 'loop' and 'lookup' are missing")
        verify = {int(length): _curve(points) for length, points in content["verify"].items()}
        shapes = {tuple(map(int, levels)): float(ms) for levels, ms in content.get("shapes", [])}
        return cls(batch, verify, curves["loop"], curves["lookup"], curves["read"], curves["level"], shapes)


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(x), float(y)) for x, y in points))
