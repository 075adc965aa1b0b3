"""The drafter protocol: what a drafter is given, and what it returns.

Shapes: B batch rows, P new positions, F features, K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specheads.decoding.acceptance import Verdict
from specheads.decoding.planner import Plan
from specheads.decoding.sampler import Sampler
from specheads.decoding.target.causal import Target
from specheads.decoding.tree import DraftTree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """All a drafter may look at when it proposes.

    root (B,): the last emitted token, not yet in the target's cache.
    features (B, P, F), following (B, P), new (B,): the target's features at the `new` positions committed since the
      last proposal (the prompt at first), and the token behind each; entries past `new` are meaningless.
    last (B,): the column of the newest of them, 0 in a row that has none.
    history: each row's ids up to and with the root, unpadded, on the host.
    memory: the drafter's own between proposals (its KV cache, say); it puts there what it likes.
    bound: no row has more committed tokens than this (host integer).
    top (B, P, K): the target's likeliest tokens behind the new positions, best first; behind the prompt those of its
      last position alone. None unless the drafter has a `wants_target_top` = K above 0.
    source: behind an encoder, each row's source ids, unpadded, on the host; None without one, or where unknown.
    """

    target: Target
    root: Tensor
    features: Tensor
    following: Tensor
    new: Tensor
    last: Tensor
    history: list[list[int]]
    bound: int
    memory: dict[str, Any] = field(default_factory=dict)
    top: Tensor | None = None
    source: list[list[int]] | None = None

    def newest(self, values: Tensor) -> Tensor:
        """(B, P, …) → (B, …) at the column `last`."""
        return values[torch.arange(len(values), device=values.device), self.last]

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What make() gave at the first proposal, where alone it is called."""
        if name not in self.memory:
            self.memory[name] = make()
        return self.memory[name]

    def haystack(self, row: int, ids: list[int]) -> list[int]:
        """What an n-gram of `ids`, the text of batch row `row`, is looked for in: its source, where it has one, and
        the text behind it."""
        return ids if self.source is None else [*self.source[row], *ids]

    @classmethod
    def start(
        cls, target: Target, ids: Tensor, lengths: Tensor, features: Tensor, root: Tensor, top: Tensor | None = None
    ) -> Context:
        """Behind the prefill of ids (B, T), packed left, of lengths (B,); root (B,) is the first token drawn."""
        last = lengths - 1
        following = torch.cat([ids[:, 1:], ids[:, :1]], 1).scatter(1, last.unsqueeze(1), root.unsqueeze(1))
        rows = zip(ids.tolist(), lengths.tolist(), root.tolist(), strict=True)
        history = [[*row[:length], first] for row, length, first in rows]
        source = target.source.ids if target.source is not None else None
        return cls(target, root, features, following, lengths, last, history, ids.shape[1], top=top, source=source)

    def extend(
        self,
        verdict: Verdict,
        following: Tensor,
        features: Tensor,
        emitted: list[list[int]],
        top: Tensor | None = None,
    ) -> Context:
        """Behind one verified tree: features (B, N, F) and top (B, N, K) of its nodes, following (B, P) the tokens
        behind those of the verdict's path; emitted: each row's gain."""
        path = verdict.path
        for row, more in zip(self.history, emitted, strict=True):
            row += more
        return replace(
            self,
            root=verdict.bonus,
            features=features.gather(1, path.unsqueeze(-1).expand(-1, -1, features.shape[-1])),
            following=following,
            new=verdict.length,
            last=verdict.last,
            bound=max(len(row) for row in self.history) - 1,
            top=None if top is None else top.gather(1, path.unsqueeze(-1).expand(-1, -1, top.shape[-1])),
        )


class Drafter(Protocol):
    """Proposes a tree of tokens that may follow the root. layers: target hidden_states it wants (HF indices).

    One that was trained on texts of so many tokens at most may have a `trained_length`: past it generate() says so.
    One that has a network for each depth may have a `fixed_depth`: static trees given by name are as deep.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...
    def default_plan(self, device: torch.device, do_sample: bool) -> Plan: ...
    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree: ...
