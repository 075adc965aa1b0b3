"""What a cascade has drafted after each row's text so far, on the host, and the plan with which a head at its front
reviews that.

Shapes: B batch rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from specheads.decoding.acceptance.tokens import accepted_in_review
from specheads.decoding.planner import Expand
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass
class CascadeState:
    """All by batch row.

    ids: the text and the tokens drafted after it; text: how many ids are text; q: the probability of each drafted token
    under the draft that wrote it or was the last to accept it; read[d]: how many leading ids draft d has in its cache.
    """

    ids: list[list[int]]
    text: list[int]
    q: list[list[float]]
    read: list[list[int]]

    @classmethod
    def of(cls, history: Sequence[Sequence[int]], num_drafts: int) -> CascadeState:
        """Nothing drafted. Each draft has read the text up to its last id: a review needs the logits after that one."""
        lengths = [len(row) for row in history]
        return cls(
            [list(row) for row in history], lengths, [[] for _ in history],
            [[length - 1 for length in lengths] for _ in range(num_drafts)],
        )  # fmt: skip

    def follow(self, history: Sequence[Sequence[int]]) -> None:
        """Replace the text by `history`. Caches keep the ids before the first that differs."""
        for b, text in enumerate(history):
            start = self.text[b]
            pairs = zip(self.ids[b][start:], text[start:], strict=False)
            self.cut(b, start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.ids[b] += text[len(self.ids[b]) :]
            self.text[b], self.q[b] = len(text), []

    def replace_rows(self, rows: Sequence[int], history: Sequence[Sequence[int]]) -> None:
        """Restart these rows, each with its text in `history`."""
        new = CascadeState.of(history, len(self.read))
        for i, b in enumerate(rows):
            self.ids[b], self.text[b], self.q[b] = new.ids[i], new.text[i], new.q[i]
            for lengths, new_lengths in zip(self.read, new.read, strict=True):
                lengths[b] = new_lengths[i]

    def drafted(self, b: int) -> list[int]:
        return self.ids[b][self.text[b] :]

    def add(self, b: int, tokens: Sequence[int], q: Sequence[float]) -> None:
        self.ids[b] += tokens
        self.q[b] += q

    def cut(self, b: int, length: int) -> None:
        """Drop the row's ids from index `length` on."""
        del self.ids[b][length:], self.q[b][max(0, length - self.text[b]) :]
        for lengths in self.read:
            lengths[b] = min(lengths[b], length)


@dataclass(frozen=True)
class HeadReview:
    """Grows one chain of `depth` tokens in `state`. At each level the head accepts the token drafted there if it is the
    head's likeliest, or by `leniency`; else the head's likeliest replaces it, and write(1, rows) drafts again after it.
    At leniency 1 nothing is written: the result would be the head's own chain anyway.

    drafting_slots: slots of the head's cache, into which an accepted draft is fed whole. rows: the batch rows that
    draft.
    """

    depth: int
    drafting_slots: int
    leniency: float
    state: CascadeState
    rows: list[int]
    write: Callable[[int, list[int]], None]

    @property
    def num_nodes(self) -> int:
        return self.depth + 1

    def limited(self, depth: int) -> HeadReview:
        return replace(self, depth=min(depth, self.depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        """Leaves the drafts in `state`; the returned tree is the root alone."""
        state, undrafted = self.state, self.rows
        tokens, above = root.unsqueeze(1), None
        for level in range(self.depth):
            if undrafted and self.leniency > 1:
                self.write(1, undrafted)
            children = expand(tokens, above)
            best, ids = children.top(1)
            likeliest, q_likeliest = ids[:, 0, 0].tolist(), best[:, 0, 0].exp().tolist()
            written = [row[start + level : start + level + 1] for row, start in zip(state.ids, state.text, strict=True)]
            p = [0.0] * len(written)  # the reviewer's, here the head's
            if self.leniency > 1:
                written_ids = torch.tensor([row or [0] for row in written], device=root.device)
                p = children.probs_of(written_ids)[:, 0].tolist()
            undrafted = []
            for b in self.rows:
                if not written[b] or not accepted_in_review(
                    likeliest[b] == written[b][0], p[b], state.q[b][level], self.leniency
                ):
                    state.cut(b, state.text[b] + level)
                    state.add(b, likeliest[b : b + 1], q_likeliest[b : b + 1])
                    undrafted.append(b)
            drafted = [row[start + level : start + level + 1] for row, start in zip(state.ids, state.text, strict=True)]
            tokens = torch.tensor([row or [0] for row in drafted], device=root.device)
            above = torch.zeros_like(tokens)
        return DraftTree.root_only(root)
