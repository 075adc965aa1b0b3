"""CachedModel: a model that reads each row's text once, and drafts in the scratch slots of its KV cache.

Shapes: B batch rows, U unread tokens, k nodes a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.model_inputs import embedding_count, input_device
from specheads.decoding.verify.seq2seq import Source, make_target


class CachedModel:
    """A draft model with the rows of a batch in its KV cache: their text, and the tokens drafted after it.

    Drafted tokens that were accepted stay in the cache, so each token is fed once.
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
        """Reads rows of ids, none of them empty; `logits` (B, 1, V) then follow each row's last token.

        limit: the longest a text gets, `scratch` tokens of overshoot aside; scratch: the most nodes drafted after the
        text; source: ids for an encoder-decoder's encoder, which encodes them once.
        """
        encoded = None if source is None else Source.encode(model, source)
        self.target = make_target(model, scratch=scratch, source=encoded)
        self.device, self.last_id = input_device(model), embedding_count(model) - 1
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        columns = max(map(len, rows))
        ids = torch.tensor([row + [0] * (columns - len(row)) for row in rows], device=self.device)
        room = max(0, limit - columns) + 1  # the last token of a text is fed too
        self.logits = self.target.prefill(self._with_embedding(ids), lengths, room=room).logits  # (B, 1, V)
        self.levels: Any
        self.nodes: list[tuple[Tensor, Tensor]] = []  # tokens and parents (B, k) of each level drafted
        # (B,) bool: False for rows whose text has changed since their nodes were drafted
        self.current = torch.ones(len(rows), dtype=torch.bool, device=self.device)

    def read(self, unread: Tensor, count: Tensor, bound: int) -> Tensor:
        """Feed the text since the last call, unread (B, U) of count (B,) tokens a row → logits (B, 1, V) after it.

        A row of count 0 stays as it is, and its logits are meaningless. bound: the length of the longest row, or more
        (host integer).
        """
        unread, count = unread.to(self.device), count.to(self.device)
        self.target.prepare(bound)
        known = self._commit_drafted(unread, count - 1)  # the last token is always fed, for its logits
        for logits, fresh in self._feed(unread, known, count - known):
            newest = logits[torch.arange(len(logits), device=self.device), (fresh - 1).clamp_min(0)].unsqueeze(1)
            self.logits = torch.where((fresh > 0).view(-1, 1, 1), newest, self.logits)
        self.nodes, self.current = [], torch.ones_like(self.current)
        return self.logits

    def review(self, unread: Tensor, count: Tensor, bound: int) -> Tensor:
        """Feed unread (B, U) of count (B,) tokens a row, as `read` does, but return the logits (B, U, V) after each.

        Tokens that are then rejected must be removed by `rewind`.
        """
        unread, count = unread.to(self.device), count.to(self.device)
        self.target.prepare(bound)
        logits = [logits for logits, _ in self._feed(unread, torch.zeros_like(count), count)]
        self.nodes = []
        return torch.cat(logits, 1)

    def rewind(self, lengths: Tensor) -> None:
        """Keep only the first lengths (B,) tokens of each row; a row that loses some loses its drafted nodes too.

        Not for models with recurrent layers, whose state cannot be rewound."""
        cache = self.target.cache
        self.current = self.current & (lengths.to(self.device) >= cache.lengths)
        cache.lengths = torch.minimum(cache.lengths, lengths.to(self.device))

    def replace_rows(self, rows: Tensor, other: CachedModel, lengths: Tensor) -> None:
        """Give these rows (R,) the text of `other`, a model of R rows: its first lengths (R,) tokens. Their logits are
        meaningless until more is read."""
        assert isinstance(self.target, Target) and isinstance(other.target, Target)  # only these are refilled
        self.target.cache.replace_rows(rows.to(self.device), other.target.cache, lengths.to(self.device))
        self.target.set_limit(max(self.target.limit, other.target.limit), len(self.current), self.device)

    def draft(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits (B, k, V) after the next level of a tree: tokens (B, k), with parents (B, k) in the level before."""
        tokens, parents = tokens.to(self.device), parents.to(self.device)
        if not self.nodes:
            self.levels = self.target.levels()
        self.nodes.append((tokens, parents))
        return self.target.forward_level(self.levels, tokens, parents).logits

    def _feed(self, ids: Tensor, first: Tensor, count: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Feed and commit count (B,) of the ids (B, U) from index first (B,) on, in passes of at most as many as there
        are scratch slots. Yields per pass the logits (B, u, V) after its tokens, and how many of these (B,) are valid.
        """
        columns, most = max(1, int(count.max())), self.target.scratch
        index = torch.arange(columns, device=self.device).expand(len(ids), -1)
        fed = self._with_embedding(ids).gather(1, (first.unsqueeze(1) + index).clamp(max=ids.shape[1] - 1))
        self.target.active = count > 0
        for start in range(0, columns, most):
            tokens, path = fed[:, start : start + most], index[:, : min(most, columns - start)]
            logits = self.target.verify(DraftTree(tokens, path - 1, tokens.shape[1] - 1)).logits
            fresh = (count - start).clamp(0, tokens.shape[1])
            self.target.commit(path, fresh)
            yield logits, fresh

    def _commit_drafted(self, text: Tensor, most: Tensor) -> Tensor:
        """Commit the drafted nodes that match the start of text (B, U), at most `most` (B,) of them → how many (B,)."""
        node, alive, first = torch.zeros_like(most), self.current, 0
        length, slots = torch.zeros_like(most), []
        for depth, (tokens, parents) in enumerate(self.nodes[: text.shape[1]]):
            matches = (tokens == text[:, depth : depth + 1]) & (parents == node.unsqueeze(1))
            found, node = matches.max(1)
            alive = alive & found & (depth < most)
            slots.append(first + node)
            length, first = length + alive, first + tokens.shape[1]
        if slots:
            self.target.commit(torch.stack(slots, 1), length)
        return length

    def _with_embedding(self, ids: Tensor) -> Tensor:
        """ids, with those the model has no embedding for replaced by the last it has."""
        return ids.clamp(max=self.last_id)
