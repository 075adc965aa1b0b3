"""Paths of accepted nodes through a tree. Shapes: B batch rows, N nodes, P = depth + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.decoding.tree import DraftTree


def accepted_path(tree: DraftTree, accept_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path from the root that takes the first accepted child at each node, until there is none.

    accept_mask (B, N) bool. Returns the path and its length, as `path_to` does, and its end (B,).
    """
    accept_mask = accept_mask & tree.topology.drafted
    if tree.is_chain:
        end = accept_mask[:, 1:].long().cumprod(1).sum(1)
    else:
        node = torch.arange(tree.num_nodes, device=accept_mask.device)
        end = torch.where(accepted_to_root(tree, tree.first_sibling(accept_mask)), node, 0).amax(1)
    return *path_to(tree, end), end


def accepted_to_root(tree: DraftTree, accept_mask: Tensor) -> Tensor:
    """accept_mask (B, N) bool → (B, N) bool: are a node and all its ancestors accepted? The root always is."""
    return (accept_mask.unsqueeze(1) | tree.topology.not_required).all(-1)


def path_to(tree: DraftTree, end: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (B, P) from the root to end (B,), padded with the end, and how many there are, (B,)."""
    node = torch.arange(tree.num_nodes, device=end.device)
    if tree.is_chain:
        return torch.minimum(node, end.unsqueeze(1)), end + 1
    on_path = tree.topology.ancestors[torch.arange(len(end), device=end.device), end]
    path = torch.where(on_path, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    length = on_path.sum(1)
    return torch.where(node[: tree.max_depth + 1] < length.unsqueeze(1), path, end.unsqueeze(1)), length
