"""The pictures of docs/concepts.md, from the library's own functions: python docs/site/pictures.py"""

from pathlib import Path

import torch
from matplotlib.patches import Rectangle

from specheads import pictures
from specheads.decoding.tree.topology import ancestors

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
BLUE, ORANGE, GREEN = range(3)  # of a look's colours
WORDS = ["the", "a", "his", "my", "one"]
P = torch.tensor([0.42, 0.26, 0.16, 0.10, 0.06])
Q = torch.tensor([0.26, 0.46, 0.06, 0.10, 0.12])


def tree_mask(look):
    """The tree of the page, and its mask beside a text of three tokens."""
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])
    mask = ancestors(parents)[0]
    texts = ["sat", "on", "in", "the", "a", "his", "mat"]
    text = ["the", "cat"]
    figure, ((left, right),) = pictures.panels(1, 2, 4.5, 3.9)
    depth = (mask.sum(-1) - 1).tolist()
    x = [1.5, 0.7, 2.6, 0.2, 1.3, 2.6, 0.2]
    for node, parent in enumerate(parents[0].tolist()):
        if parent >= 0:
            left.plot([x[parent], x[node]], [-depth[parent], -depth[node]], color=look.soft, zorder=1)
        colour = BLUE if node == 0 else ORANGE
        left.text(
            x[node], -depth[node], f"{node}  {texts[node]}", ha="center", va="center", color=look.page,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": look.color(colour), "edgecolor": "none"},
        )  # fmt: skip
    left.set(xlim=(-0.4, 3.3), ylim=(-3.5, 0.5))
    left.set_axis_off()
    left.set_title("node 0 is the last token of the text; 1 to 6 are drafted", fontsize=10)
    columns = len(text) + len(mask)
    for row in range(len(mask)):
        for column in range(columns):
            node = column - len(text)
            sees = node < 0 or bool(mask[row, node])
            colour = look.color(BLUE if node <= 0 else ORANGE) if sees else "none"
            right.add_patch(Rectangle((column, -row), 0.9, 0.9, facecolor=colour, edgecolor=look.soft, linewidth=0.5))
    right.set(xlim=(-0.1, columns), ylim=(-len(mask) + 0.9, 1))
    right.set_xticks([c + 0.45 for c in range(columns)], [*text, *texts], rotation=45, ha="left", fontsize=9)
    right.set_yticks(
        [-r + 0.45 for r in range(len(mask))], [f"{r}  {word}" for r, word in enumerate(texts)], fontsize=9
    )
    right.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    for side in right.spines.values():
        side.set_visible(False)
    right.set_aspect("equal")
    right.grid(visible=False)
    right.set_xlabel("filled: the node of this row sees it", fontsize=10)
    return figure


def bars(axis, look, parts, title):
    """Stacked bars over WORDS. parts: (heights (V,), colour, label)."""
    below = torch.zeros(len(WORDS))
    for heights, colour, label in parts:
        axis.bar(WORDS, heights, bottom=below, color=look.color(colour), label=label, width=0.7)
        below = below + heights
    axis.set_title(title, fontsize=9)
    axis.set_ylim(0, 0.6)
    axis.legend(frameon=False, fontsize=9)
    axis.grid(visible=False, axis="x")


def lossless(look):
    """p, q, and what acceptance and the residual add up to: p."""
    figure, (axes,) = pictures.panels(1, 3, 3, 3, sharey=True)
    accepted, residual = torch.minimum(P, Q), (P - Q).clamp(min=0)
    torch.testing.assert_close(accepted + (1 - accepted.sum()) * residual / residual.sum(), P)
    bars(axes[0], look, [(Q, ORANGE, "q, the draft")], "a token is drawn from q")
    bars(axes[1], look, [(accepted, GREEN, "accepted: min(p, q)")], f"{accepted.sum():.0%} of drafts are accepted")
    bars(
        axes[2], look, [(accepted, GREEN, "accepted"), (residual, BLUE, "residual")], "together they are p, the target"
    )
    axes[0].set_ylabel("probability")
    return figure


def lossy(look):
    """What comes out if all tokens with p above Typical's threshold are accepted, beside p."""
    figure, (axes,) = pictures.panels(1, 2, 4.5, 3, sharey=True)
    entropy = -(P * P.log()).sum()
    accepts = (torch.minimum(torch.tensor(0.3), 0.3 * torch.exp(-entropy)) < P).float()  # Typical of ε = δ = 0.3
    accepted = Q * accepts
    rest = (1 - accepted.sum()) * P  # a rejected draft is followed by a token of p
    out = accepted + rest
    bars(axes[0], look, [(P, BLUE, "p, the target")], "exact: what comes out is p")
    missed = 0.5 * (out - P).abs().sum()
    title = f"typical: {accepted.sum():.0%} are accepted, and p is missed by {missed:.2f} (TV)"
    bars(axes[1], look, [(accepted, GREEN, "accepted drafts"), (rest, BLUE, "drawn from p")], title)
    axes[0].set_ylabel("probability")
    return figure


if __name__ == "__main__":
    for draw in (tree_mask, lossless, lossy):
        pictures.save(FOLDER / f"{draw.__name__}.svg", draw)
