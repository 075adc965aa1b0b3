"""Paths through a tree some of whose nodes are marked. Where Python may read numbers it follows them on lists.

Shapes: B batch rows, N nodes, P = depth + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads import host
from specheads.tree import DraftTree


def kept_path(tree: DraftTree, kept: host.Marks) -> tuple[Tensor, Tensor, Tensor]:
    """The path that goes on to the first child that is kept (B, N) as long as there is one, as `path_to` gives it, and
    its end (B,)."""
    kept = host.marks(kept)
    if not isinstance(kept, Tensor):
        rows = zip(kept, tree.shape.parent_lists, strict=True)
        return listed(tree, [followed(marks, parents) for marks, parents in rows])
    kept = kept & tree.shape.drafted
    if tree.is_chain:
        end = kept[:, 1:].long().cumprod(1).sum(1)
    else:
        node = torch.arange(tree.num_nodes, device=kept.device)
        end = torch.where(standing(tree, tree.eldest(kept)), node, 0).amax(1)
    return *path_to(tree, end), end


def followed(marks: list[bool], parents: list[int]) -> list[int]:
    """The nodes of one row's path, as in `kept_path`."""
    path = [0]
    for node, above in enumerate(parents):  # which stand before their children
        if marks[node] and above == path[-1]:
            path.append(node)
    return path


def listed(tree: DraftTree, paths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's path, from the root, as tensors: the nodes (B, P), how many there are (B,), and the last (B,)."""
    most = tree.max_depth + 1
    made = torch.tensor([path + path[-1:] * (most - len(path)) + [len(path)] for path in paths])
    return made.narrow(1, 0, most), made.select(1, most), made.select(1, most - 1)


def standing(tree: DraftTree, kept: Tensor) -> Tensor:
    """(B, N) is each node kept by itself? → (B, N) is it and all above it? The root always is."""
    return (kept.unsqueeze(1) | tree.shape.unneeded).all(-1)


def path_to(tree: DraftTree, end: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (B, P) from the root to end (B,), and how many there are, (B,)."""
    if host.reads(end):
        climbed = []
        for last, parents in zip(end.tolist(), tree.shape.parent_lists, strict=True):
            up = [last]
            while up[-1]:
                up.append(parents[up[-1]])
            climbed.append(up[::-1])
        return listed(tree, climbed)[:2]
    node = torch.arange(tree.num_nodes, device=end.device)
    if tree.is_chain:
        return torch.minimum(node, end.unsqueeze(1)), end + 1
    on_path = tree.shape.ancestors[torch.arange(len(end), device=end.device), end]
    path = torch.where(on_path, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    return path, on_path.sum(1)


def either(one: host.Marks, other: host.Marks) -> host.Marks:
    """Marked by one or the other."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one | other
    return [[a or b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


def reached(marks: list[bool], maybe: list[bool], parents: list[int]) -> tuple[list[bool], list[bool]]:
    """Of one row: may a path lead to each node, where it goes on to the first child that is marked, or to one before it
    that is `maybe`; and has each node a child that is marked?"""
    leads, decided = [above < 0 for above in parents], [False] * len(parents)
    for node, above in enumerate(parents):
        if above >= 0:
            leads[node] = leads[above] and not decided[above] and (marks[node] or maybe[node])
            decided[above] = decided[above] or marks[node]
    return leads, decided
