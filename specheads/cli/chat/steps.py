"""Records the tree drafted in each step, so that rejected drafts can be shown without passing it through the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads.decoding.drafters import Drafter
from specheads.decoding.tree import DraftTree


class Watched:
    """Wraps a drafter so that its latest tree can be read; otherwise it behaves like the drafter itself."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tree: DraftTree | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *args: Any, **kwargs: Any) -> DraftTree:
        self.tree = self.drafter.propose(*args, **kwargs)
        return self.tree

    def take(self) -> DraftTree | None:
        """The tree of the last step; None if nothing was drafted."""
        tree, self.tree = self.tree, None
        return tree


def rejected_path(tree: DraftTree, accepted: Sequence[int]) -> list[int]:
    """The first row's rejected draft after the `accepted` tokens; if it has several branches, the first path."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def child(node: int, token: int | None = None) -> int | None:
        nodes = range(1, len(tokens))
        return next((i for i in nodes if parents[i] == node and token in (None, tokens[i])), None)

    node = 0
    for token in accepted:
        below = child(node, token)
        assert below is not None, f"token {token} was accepted and not drafted"
        node = below
    path = []
    while (below := child(node)) is not None:
        path.append(tokens[below])
        node = below
    return path
