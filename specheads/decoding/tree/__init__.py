"""A draft tree, its topology, and the draft's logits at its nodes."""

from specheads.decoding.tree.draft_tree import DraftTree
from specheads.decoding.tree.topology import TreeTopology, ancestors

__all__ = ["DraftTree", "TreeTopology", "ancestors"]
