"""Drafters that know what may follow as whole runs of ids, on the host: their runs become a draft tree.

A run of a row is a list of ids, the likeliest run first. Such a draft is a point mass, so it is lossless whatever the
runs are. B batch rows, N nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import MAX_NODES, Plan, StaticTree
from specheads.decoding.planner.plan import within
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology

Parents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PathDrafter(Drafter, ABC):
    """Drafts runs of ids. Of a plan only num_nodes and depth are read: runs are cut to them, the first ones first.

    num_tokens: ids drafted a run, where no plan says otherwise; width: runs at most, of distinct first ids.
    """

    num_tokens: int = 10
    width: int = 1
    positional: ClassVar[tuple[str, ...]] = ("num_tokens",)  # in texts: see `Registry`
    layers: ClassVar[tuple[int, ...]] = ()
    gives_draft_probs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._at_least("num_tokens", 1)
        self._at_least("width", 1)
        within(f"{type(self).__name__}: num_tokens × width", self.num_tokens * self.width, MAX_NODES - 1)

    def _at_least(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be a whole number of at least {least}")

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return StaticTree(tuple((run, *(0,) * d) for run in range(self.width) for d in range(self.num_tokens)))

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        return tree_of(context.root, context.history, self.runs(context, plan.depth), plan)

    @abstractmethod
    def runs(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[list[list[int]]]:
        """Per row up to `width` runs of at most `length` ids that may follow its history.

        rows: instead, what may follow these ids, by batch row: its history and what was drafted behind it. Nothing is
        learnt from drafts.
        """

    def reset(self) -> None:
        """Forget earlier prompts. Most drafters keep nothing beyond a context's memory."""
        return


def tree_of(
    root: Tensor, history: Sequence[Sequence[int]], runs: Sequence[Sequence[Sequence[int]]], plan: Plan
) -> DraftTree:
    """root (B,), the last ids of history, and each row's runs → their tree, of plan.num_nodes nodes at most.

    Runs that begin alike share nodes. Rows without so many nodes leave slots unused. On the CPU, where nodes cost
    time, the tree ends with the row that has the most; elsewhere it has the plan's size, so that shapes repeat.
    """
    rows, depth = [], 0
    for own, ids in zip(runs, history, strict=True):
        tokens, parents = [ids[-1]], [-1]
        children: dict[tuple[int, int], int] = {}
        for run in own:
            node = 0
            for level, token in enumerate(run[: plan.depth], start=1):
                child = children.get((node, token))
                if child is None:
                    if len(tokens) == plan.num_nodes:
                        break
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    depth = max(depth, level)
                node = child
        rows.append((tokens, parents))
    size = max(len(tokens) for tokens, _ in rows)
    if root.device.type != "cpu":
        size, depth = plan.num_nodes, plan.depth
    topology = _topology(tuple((*parents, *(-1,) * (size - len(parents))) for _, parents in rows), depth, root.device)
    # An unused slot repeats the root: an id like any other, which nothing reads.
    padded = [tokens + [tokens[0]] * (size - len(tokens)) for tokens, _ in rows]
    return DraftTree(torch.tensor(padded, device=root.device), topology.parents, depth, topology=topology)


@lru_cache(maxsize=128)
def _topology(parents: Parents, depth: int, device: torch.device) -> TreeTopology:
    """Shapes come again and again (chains, above all), and making one costs more than drafting."""
    return TreeTopology.of(torch.tensor(parents, device=device), depth)
