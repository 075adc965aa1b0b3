"""PathDrafter: drafters that copy or count on the host, and propose whole paths of ids; the paths become a tree.

A path is a list of ids that may follow a row; the likeliest path comes first. Such a draft is a point mass, so it is
lossless whatever the paths are. B batch rows, N nodes.
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
from specheads.decoding.planner import MAX_NODES, Plan
from specheads.decoding.planner.plan import require_at_most
from specheads.decoding.planner.static import parallel_chains
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology

Paths = list[list[int]]


@dataclass(frozen=True)
class PathDrafter(Drafter, ABC):
    """Drafts paths of ids. Of a plan it uses only num_nodes and depth, to which paths are cut, in order.

    num_tokens: ids per path where no plan says otherwise; width: the most paths, each with a different first id.
    """

    num_tokens: int = 10
    width: int = 1
    positional: ClassVar[tuple[str, ...]] = ("num_tokens",)  # in texts: see `Registry`
    layers: ClassVar[tuple[int, ...]] = ()
    gives_draft_probs: ClassVar[bool] = False
    refillable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._at_least("num_tokens", 1)
        self._at_least("width", 1)
        require_at_most(f"{type(self).__name__}: num_tokens × width", self.num_tokens * self.width, MAX_NODES - 1)

    def _at_least(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be a whole number of at least {least}")

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return parallel_chains(self.width, self.num_tokens)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        paths = self.paths(context, plan.depth)
        return build_tree(context.root, context.history, paths, plan, static=context.target.static)

    @abstractmethod
    def paths(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[Paths]:
        """Per row up to `width` paths of at most `length` ids that may follow its history.

        rows: batch row → the ids to continue instead, its history and what was drafted after it. The drafter learns
        nothing from drafts.
        """

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        for row in rows if "texts" in context.memory else ():
            context.memory["texts"][row] = ""  # read again at the next proposal

    def reset(self) -> None:
        """Forget earlier prompts. Most drafters store nothing outside a context's memory."""
        return


def build_tree(
    root: Tensor, history: Sequence[Sequence[int]], paths: Sequence[Paths], plan: Plan, *, static: bool = False
) -> DraftTree:
    """root (B,), the last id of each history, and each row's paths → their tree, of plan.num_nodes nodes at most.

    Paths share the nodes of a common beginning. A row with fewer nodes leaves slots unused. On the CPU, where each node
    costs time, the tree is as large as the largest row; elsewhere, or if `static`, it has the plan's size, so that
    shapes repeat.
    """
    rows, depth = [], 0
    for row_paths, ids in zip(paths, history, strict=True):
        tokens, parents = [ids[-1]], [-1]
        children: dict[tuple[int, int], int] = {}
        for path in row_paths:
            node = 0
            for level, token in enumerate(path[: plan.depth], start=1):
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
    if static or root.device.type != "cpu":
        size, depth = plan.num_nodes, plan.depth
    topology = cached_topology(
        tuple((*parents, *(-1,) * (size - len(parents))) for _, parents in rows), depth, root.device
    )
    # An unused slot repeats the root: a valid id, which nothing reads.
    padded = [tokens + [tokens[0]] * (size - len(tokens)) for tokens, _ in rows]
    return DraftTree(torch.tensor(padded, device=root.device), topology.parents, depth, topology=topology)


@lru_cache(maxsize=128)
def cached_topology(parents: tuple[tuple[int, ...], ...], depth: int, device: torch.device) -> TreeTopology:
    """Cached, because shapes (above all chains) repeat, and computing one costs more than drafting."""
    return TreeTopology.of(torch.tensor(parents, device=device), depth)
