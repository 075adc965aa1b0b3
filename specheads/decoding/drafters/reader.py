"""Reader: a model that reads each row's text once, and drafts behind it in the scratch slots of its cache.

Shapes: B batch rows, U unread tokens, k nodes a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.target.seq2seq import Source, make_target
from specheads.decoding.tree import DraftTree


class Reader:
    """What a draft model knows of the rows of a batch: their text in its cache, and what it drafted behind it.

    Drafted tokens that became text are kept where they lie in the cache, so each token is fed once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: list[list[int]],
        *,
        scratch: int,
        limit: int,
        source: list[list[int]] | None = None,
    ) -> None:
        """Reads rows of text, none of them empty; `logits` are then those behind each. limit: no text gets longer,
        `scratch` tokens of overshoot aside; scratch: the most nodes drafted below the text; source: the rows of an
        encoder-decoder's source, which it encodes once."""
        encoded = None if source is None else Source.encode(model, source)
        self.target = make_target(model, scratch=scratch, source=encoded)
        weight: Any = model.get_input_embeddings().weight
        self.device, self.last_id = weight.device, len(weight) - 1
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        columns = max(map(len, rows))
        ids = torch.tensor([row + [0] * (columns - len(row)) for row in rows], device=self.device)
        room = max(0, limit - columns) + 1  # the last token of a text is fed too
        self.logits = self.target.prefill(self._known(ids), lengths, room=room).logits  # (B, 1, V)
        self.levels: Any
        self.nodes: list[tuple[Tensor, Tensor]] = []  # tokens and parents (B, k) of each level drafted
        self.current = torch.ones(len(rows), dtype=torch.bool, device=self.device)  # was it drafted behind this text?

    def read(self, unread: Tensor, count: Tensor, bound: int) -> Tensor:
        """Take in the text since last time, unread (B, U) of count (B,) tokens a row; logits (B, 1, V) behind it.

        A row of count 0 stays as it is, and its logits mean nothing. bound: no row is longer now (host integer).
        """
        unread, count = unread.to(self.device), count.to(self.device)
        kept = self._keep_drafted(unread, count - 1, bound)  # the last token is fed in any case, for its logits
        for logits, fresh in self._feed(unread, kept, count - kept, bound):
            newest = logits[torch.arange(len(logits), device=self.device), (fresh - 1).clamp_min(0)].unsqueeze(1)
            self.logits = torch.where((fresh > 0).view(-1, 1, 1), newest, self.logits)
        self.nodes, self.current = [], torch.ones_like(self.current)
        return self.logits

    def review(self, unread: Tensor, count: Tensor, bound: int) -> Tensor:
        """Take in unread (B, U) of count (B,) tokens a row, as `read`, but return the logits (B, U, V) behind each.

        Which of them become text is not settled: `rewind` forgets the others.
        """
        unread, count = unread.to(self.device), count.to(self.device)
        behind = [logits for logits, _ in self._feed(unread, torch.zeros_like(count), count, bound)]
        self.nodes = []
        return torch.cat(behind, 1)

    def rewind(self, lengths: Tensor) -> None:
        """Forget all behind the first lengths (B,) tokens of each row, and what was drafted there."""
        cache = self.target.cache
        self.current = self.current & (lengths.to(self.device) >= cache.lengths)
        cache.lengths = torch.minimum(cache.lengths, lengths.to(self.device))

    def draft(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits (B, k, V) behind the next level of a growing tree: tokens (B, k) below parents of the level before."""
        tokens, parents = tokens.to(self.device), parents.to(self.device)
        if not self.nodes:
            self.levels = self.target.levels()
        self.nodes.append((tokens, parents))
        return self.target.forward_level(self.levels, tokens, parents).logits

    def _feed(self, ids: Tensor, first: Tensor, count: Tensor, bound: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Feed and keep count (B,) of the ids (B, U) from first (B,) on, in passes of as many as
        there are scratch slots; of each pass the logits (B, u, V) behind its tokens, and how many (B,) are
        the row's own."""
        columns, most = max(1, int(count.max())), self.target.scratch
        place = torch.arange(columns, device=self.device).expand(len(ids), -1)
        fed = self._known(ids).gather(1, (first.unsqueeze(1) + place).clamp(max=ids.shape[1] - 1))
        self.target.active = count > 0
        for start in range(0, columns, most):
            tokens, own = fed[:, start : start + most], place[:, : min(most, columns - start)]
            logits = self.target.verify(DraftTree(tokens, own - 1, tokens.shape[1] - 1)).logits
            fresh = (count - start).clamp(0, tokens.shape[1])
            self.target.commit(own, fresh, bound)
            yield logits, fresh

    def _keep_drafted(self, text: Tensor, most: Tensor, bound: int) -> Tensor:
        """Keep the drafted nodes that spell the start of text (B, U), at most most (B,) of them; how many, (B,)."""
        node, alive, first = torch.zeros_like(most), self.current, 0
        kept, slots = torch.zeros_like(most), []
        for depth, (tokens, parents) in enumerate(self.nodes[: text.shape[1]]):
            spells = (tokens == text[:, depth : depth + 1]) & (parents == node.unsqueeze(1))
            found, node = spells.max(1)
            alive = alive & found & (depth < most)
            slots.append(first + node)
            kept, first = kept + alive, first + tokens.shape[1]
        if slots:
            self.target.commit(torch.stack(slots, 1), kept, bound)
        return kept

    def _known(self, ids: Tensor) -> Tensor:
        """ids, with one the model has an embedding for where it has none."""
        return ids.clamp(max=self.last_id)
