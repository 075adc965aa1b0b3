"""Length-grouped sampling that depends only on the seed and the epoch, so that a resumed run has the same order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededLengthGroups(LengthGroupedSampler):
    """LengthGroupedSampler, but its order does not depend on all earlier random draws, as transformers' does.

    The Trainer calls set_epoch() before each epoch.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()
