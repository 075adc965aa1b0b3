"""/tree: the last drafted tree, with the base's probability of each token and the path that was accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from specheads import terminal
from specheads.decoding.acceptance import Verdict
from specheads.decoding.tree import DraftTree

_ACCEPTED, _REJECTED, _OWN = ("✓", terminal.ACCEPTED), ("✗", "bright_black"), ("→", terminal.OWN)  # mark and style


@dataclass
class TreeWatch:
    """As `loop.step_watch`: keeps the last step that drafted."""

    last: tuple[DraftTree, Tensor, Verdict] | None = None

    def __call__(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> None:
        if tree.num_nodes > 1:
            self.last = (tree, logits, verdict)


def drawn(tree: DraftTree, logits: Tensor, verdict: Verdict, tokenizer: Any) -> tuple[str, Tree]:
    """A line that says what is drawn, and the drawing of row 0: tokens that follow one another without a choice share a
    line. logits (B, N, V): the base's at each node."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    path = verdict.path[0, : int(verdict.length[0])].tolist()
    probs = logits[0].float().softmax(-1)
    drafted = [node for node, parent in enumerate(parents) if parent >= 0]
    children: dict[int, list[int]] = {node: [] for node in (0, *drafted)}
    for node in drafted:
        children[parents[node]].append(node)
    own = len(tokens)  # a node of its own: the model's next token
    tokens, parents, children[own] = [*tokens, int(verdict.bonus[0])], [*parents, path[-1]], []
    children[path[-1]].append(own)

    def name(node: int) -> str:
        return terminal.printable(repr(tokenizer.decode([tokens[node]])))

    def grow(branch: Tree, node: int) -> None:
        line = Text()
        while True:
            mark, style = _OWN if node == own else _ACCEPTED if node in path else _REJECTED
            line.append(f"{mark} {name(node)}", style).append(
                f" {float(probs[parents[node], tokens[node]]):.2f}", "dim"
            )
            if len(children[node]) != 1:
                break
            (node,) = children[node]
            line.append("  ")
        branch = branch.add(line)
        for child in children[node]:
            grow(branch, child)

    root = Tree(name(0), guide_style="bright_black")
    for child in children[0]:
        grow(root, child)
    title = (
        f"the last tree: {len(path) - 1} of {len(drafted)} drafts accepted (✓), → the model's own next token, with the "
        "model's probabilities"
    )
    return title, root
