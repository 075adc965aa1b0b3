"""Random numbers of training, and the sample of each row's positions, its anchors, that they choose.

Numbers depend on a row's tokens and a seed, not on its batch, process or device, so a run that resumes with a different
number of processes draws the same. Counter-based, as in `decoding.probs.randomness`.

Anchors: `AnchoredStarts` samples where drafts start, for heads that draft level by level; `AnchoredBlocks` the blocks
of a parallel head. Both are weighted so that the loss is an unbiased estimate. Fewer cost less memory and time. The
accepted length that training logs is that of the anchors alone; each counts once, so long rows count for less, and
starts before an answer's last token not at all. Evaluation uses all starts.
Shapes: B batch rows, T positions, A anchors of a row, S drafts of a position, D tokens that a block drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.probs.randomness import GOLDEN, scramble, shift_right
from specheads.losses.targets import DraftTargets


def random_keys(tokens: Tensor, documents: Tensor, seed: int) -> Tensor:
    """(B, T) int64 a key for each position, from the row's tokens, the position among them and the seed. Padding
    (document 0) does not count."""
    real = documents > 0
    position = real.cumsum(1)
    start = scramble(torch.tensor(seed)).to(tokens.device)
    row = (scramble(tokens + position * GOLDEN) * real).sum(1, keepdim=True)
    return scramble(scramble(row ^ start) + position * GOLDEN)


def uniform(key: Tensor) -> Tensor:
    """(…) int64 → (…) float32, uniform over [0, 1) in steps of 2⁻²⁴."""
    return shift_right(key, 40).float() * 2**-24


def split_keys(key: Tensor, count: int) -> Iterator[Tensor]:
    """(B, T) keys → for each row (T, count) new keys. Row by row, because all keys at once, of eight bytes each, would
    take more memory than the numbers drawn from them."""
    steps = torch.arange(1, count + 1, device=key.device) * GOLDEN
    for row in key:
        yield scramble(row.unsqueeze(1) + steps)


def check_anchors(kind: str, anchors: int | None, anchor_first: bool, dpace: float | None) -> None:
    """ValueError unless these options of a head, see `AnchoredStarts`, go together."""
    if anchor_first and anchors is None:
        raise ValueError(f"{kind} head option anchor_first is for a sample of starts: give anchors, their number, too")
    if anchors is not None and dpace is not None:
        raise ValueError(
            f"{kind} head options anchors and dpace: D-PACE weights a draft by its deeper ones, which anchors leave "
            "out; give one of them"
        )


def anchored_share(anchors: int | None, anchor_first: bool, length: int, depth: int) -> float:
    """The share of starts whose drafts at `depth` are trained on, in a row of `length` tokens."""
    if anchors is None or depth < 1 - anchor_first:
        return 1.0
    return min(anchors, length) / length


@dataclass(frozen=True, slots=True)
class AnchoredStarts:
    """columns (B, A): the anchors. weights (B, A): how many starts each represents; 0 for padding. depth: the first
    depth at which only the anchors draft."""

    columns: Tensor
    weights: Tensor
    depth: int

    @classmethod
    def sample(cls, targets: DraftTargets, keys: Tensor, count: int, depth: int = 1) -> AnchoredStarts:
        """In each row, sample `count` of the starts that have a draft at `depth` or deeper, or take all if fewer.

        Each start is equally likely, so a weighted sum over them is unbiased. keys (B, T): see TapBatch.keys.
        """
        able = torch.zeros(targets.size, dtype=torch.bool, device=keys.device)
        able[targets.starts[:, depth:][targets.valid[:, depth:]]] = True
        able = able.view(keys.shape)
        available = able.sum(1, keepdim=True)
        order = uniform(keys).masked_fill(~able, -1)
        # At least one column, since layers of transformers cannot take none.
        columns = order.topk(max(1, min(count, int(available.max()))), 1).indices
        return cls(columns, able.gather(1, columns) * (available / available.clamp(1, count)), depth)

    def select(self, targets: DraftTargets) -> DraftTargets:
        """The targets with only the drafts of the anchors, and all drafts above `depth`."""
        row_starts = torch.arange(len(self.columns), device=self.columns.device).unsqueeze(1) * self._length(targets)
        by_start = self.weights.new_zeros(targets.size)
        by_start[(row_starts + self.columns)[self.weights > 0]] = self.weights[self.weights > 0]
        whole, sampled = targets.weights[:, : self.depth], targets.weights[:, self.depth :]
        weights = torch.cat([whole, sampled * by_start[targets.starts[:, self.depth :]]], 1)
        return replace(targets, weights=weights, left=torch.where(by_start > 0, targets.left, 0))

    def slots(self, targets: DraftTargets) -> Tensor:
        """(B · T,) start → its index in outputs (B · A, …) computed at the anchors alone; 0 for other starts."""
        batch, number = self.columns.shape
        rows = torch.arange(batch, device=self.columns.device).unsqueeze(1)
        slot = torch.zeros(targets.size, dtype=torch.long, device=rows.device)
        slot[rows * self._length(targets) + self.columns] = rows * number + torch.arange(number, device=rows.device)
        return slot

    def _length(self, targets: DraftTargets) -> int:
        return targets.size // len(self.columns)


@dataclass(frozen=True, slots=True)
class AnchoredBlocks:
    """Blocks of a parallel head. At depth j, a block anchored at column a drafts token a + 1 + j.

    anchors (B, A): their columns, ascending. learned (B, A, D): whether the token at each depth is a target; all False
    if the anchor is padding. weights (B, A): how many blocks each represents.
    """

    anchors: Tensor
    learned: Tensor
    weights: Tensor

    @classmethod
    def sample(
        cls, supervised: Tensor, documents: Tensor, size: int, count: int | None = None, keys: Tensor | None = None
    ) -> AnchoredBlocks:
        """Blocks that draft `size` tokens: all that have a target, or `count` of them in each row.

        supervised (indexed by the predicted token) and documents (B, T). keys (B, T): see TapBatch.keys; given if and
        only if `count` is. A block's targets end before the first token that is unsupervised or of another document. At
        least one token of the document precedes an anchor, because a block reads features. As with the starts of other
        heads, the anchor itself need not be supervised.
        """
        batch, length = supervised.shape
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)  # (B, T − 1) token t + 1 token t
        none = supervised.new_zeros(batch, 1, dtype=torch.bool)
        has_target = torch.cat([supervised[:, 1:].bool() & follows, none.expand(-1, size)], 1)
        learned = has_target.unfold(1, size, 1).long().cumprod(2).bool()  # (B, T, D)
        learned = learned & torch.cat([none, follows], 1).unsqueeze(2)
        able = learned[:, :, 0]
        available = able.sum(1, keepdim=True)
        assert (count is None) == (keys is None), "a sample needs keys"
        most = length if count is None else count
        order = (able.float() if keys is None else uniform(keys)).masked_fill(~able, -1)
        anchors = order.topk(min(most, int(available.max())), 1).indices.sort(1).values
        weights = (available / available.clamp(1, most)).expand(-1, anchors.shape[1])
        return cls(anchors, learned.gather(1, anchors.unsqueeze(2).expand(-1, -1, size)), weights)

    def targets(self, tokens: Tensor, left: Tensor) -> DraftTargets:
        """Each draft that has a target, with S = 1: a position drafted by several blocks occurs several times.
        tokens (B, T); left (B, T): see `tokens_left`."""
        length, size = tokens.shape[1], self.learned.shape[2]
        row, block, depth = self.learned.nonzero(as_tuple=True)
        starts = row * length + self.anchors[row, block] - 1  # a draft starts at the token before its root
        positions = starts + 1 + depth
        sampled = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
        sampled[starts] = True
        return DraftTargets(
            positions, tokens.flatten()[positions + 1], starts.unsqueeze(1), depth.unsqueeze(1),
            self.weights[row, block].unsqueeze(1), torch.where(sampled, left.flatten(), 0), tokens.numel(), size,
        )  # fmt: skip
