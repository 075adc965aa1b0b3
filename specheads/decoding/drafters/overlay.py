"""OrCopy: a head's tree in some rows of a batch, a copy in the others, combined on the device.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology

COPIES = "copies"  # in a context's memory


@dataclass(frozen=True, eq=False)
class OrCopy(Drafter):
    """Drafts with `head`, then replaces the trees of some rows by copies (see `put_copies`)."""

    head: Drafter

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.head.default_plan(device, do_sample)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        tree = self.head.propose(context, sampler, plan)
        return overlay(tree, *context.memory[COPIES]) if plan.depth else tree


def put_copies(memory: dict[str, Any], context: Context, copies: Sequence[Sequence[int]], nodes: int) -> None:
    """Put each row's copied ids, for trees of `nodes` nodes, into the memory that the head drafts with.

    A row without ids keeps the head's tree."""
    padded = [[row[-1], *ids, *[row[-1]] * (nodes - 1 - len(ids))]
              for ids, row in zip(copies, context.history, strict=True)]  # fmt: skip
    counts = [len(ids) for ids in copies]
    device = context.root.device
    memory[COPIES] = torch.tensor(padded, device=device), torch.tensor(counts, device=device)


def overlay(tree: DraftTree, copies: Tensor, counts: Tensor) -> DraftTree:
    """The tree, in which a row with counts (B,) > 0 is the chain of its first `counts` copies (B, N) after the root."""
    num, depth = copies.shape[1], max(copies.shape[1] - 1, tree.max_depth)
    in_line = tree.num_nodes == tree.max_depth + 1
    tree, copied, index = tree.padded(num, depth), counts.unsqueeze(1) > 0, torch.arange(num, device=copies.device)
    line = torch.where(index <= counts.unsqueeze(1), index - 1, -1)
    tokens = torch.where(copied & (index > 0), copies, tree.tokens)
    parents = torch.where(copied, line, tree.parents)
    return DraftTree(tokens, parents, depth, topology=TreeTopology.of(parents, depth, in_line=in_line))
