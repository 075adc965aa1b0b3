"""The drafted tree of each step, for a view of what was refused: looked at beside the loop, which need not carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads.decoding.drafters import Drafter
from specheads.decoding.tree import DraftTree


class Watched:
    """A drafter whose latest tree can be looked at; in all else the drafter itself."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tree: DraftTree | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *args: Any, **kwargs: Any) -> DraftTree:
        self.tree = self.drafter.propose(*args, **kwargs)
        return self.tree

    def take(self) -> DraftTree | None:
        """The tree of the step that has been made; None where it drafted nothing."""
        tree, self.tree = self.tree, None
        return tree


def refused(tree: DraftTree, kept: Sequence[int]) -> list[int]:
    """What the first row of the tree drafted first behind the tokens kept: with siblings, the first path of them."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def child(node: int, token: int | None = None) -> int | None:
        places = range(1, len(tokens))
        return next((i for i in places if parents[i] == node and token in (None, tokens[i])), None)

    node = 0
    for token in kept:
        below = child(node, token)
        assert below is not None, f"token {token} was accepted and not drafted"
        node = below
    run = []
    while (below := child(node)) is not None:
        run.append(tokens[below])
        node = below
    return run
