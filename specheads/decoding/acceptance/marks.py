"""Paths through a tree some of whose nodes are marked. Shapes: B batch rows, N nodes, P = depth + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.decoding.tree import DraftTree


def kept_path(tree: DraftTree, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path that goes on to the first child that is kept (B, N) as long as there is one, as `path_to` gives it, and
    its end (B,)."""
    kept = kept & tree.topology.drafted
    if tree.is_chain:
        end = kept[:, 1:].long().cumprod(1).sum(1)
    else:
        node = torch.arange(tree.num_nodes, device=kept.device)
        end = torch.where(standing(tree, tree.first_sibling(kept)), node, 0).amax(1)
    return *path_to(tree, end), end


def standing(tree: DraftTree, kept: Tensor) -> Tensor:
    """(B, N) is each node kept by itself? → (B, N) is it and all above it? The root always is."""
    return (kept.unsqueeze(1) | tree.topology.not_required).all(-1)


def path_to(tree: DraftTree, end: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (B, P) from the root to end (B,), and how many there are, (B,)."""
    node = torch.arange(tree.num_nodes, device=end.device)
    if tree.is_chain:
        return torch.minimum(node, end.unsqueeze(1)), end + 1
    on_path = tree.topology.ancestors[torch.arange(len(end), device=end.device), end]
    path = torch.where(on_path, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    length = on_path.sum(1)
    return torch.where(node[: tree.max_depth + 1] < length.unsqueeze(1), path, end.unsqueeze(1)), length
