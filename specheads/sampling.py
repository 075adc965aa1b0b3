"""Sampler: generation config → the target's law at a node, and every random draw of decoding.

Shapes: R rows (one node of each batch row), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specheads import host
from specheads.processors import PREFIX_FREE, RowProcessor, adapted

Prefixes = Callable[[], Sequence[Sequence[int]]]


def _no_prefix(scores: Tensor) -> Any:
    """The empty ids (R, 0) that a prefix-free processor is given."""
    return torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)


def likeliest(logits: Tensor, block: int = 128) -> Tensor:
    """argmax over the last of (…, V), the first of equals."""
    if logits.device.type != "cpu" or logits.shape[-1] % block or logits.numel() < 256 * block:
        return logits.argmax(-1)
    # The largest of each block first: on a CPU a maximum alone is found several times faster than its place.
    blocks = logits.unflatten(-1, (-1, block))
    which = blocks.amax(-1).argmax(-1, keepdim=True)
    within = blocks.gather(-2, which.unsqueeze(-1).expand(*which.shape, block)).argmax(-1)
    return (which * block + within).squeeze(-1)


class Sampler:
    """The target's law p under HF logits processors, and the one generator all draws come from.

    Temperature 0 (do_sample=False) is a one-hot p, so greedy decoding needs no path of its own anywhere else.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        *,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        lengths: Sequence[int] | None = None,
        pad_token_id: int = 0,
    ) -> None:
        """prompts: each row as the caller gave it, padding and all, of which lengths are the row's own: so processors
        see it. pad_token_id: what follows in a row that has ended. ValueError for a processor that cannot judge
        drafts."""
        self.processors = adapted(processors or ())
        self.do_sample, self.generator = do_sample, generator
        self.prompts, self.lengths, self.pad_token_id = prompts, lengths, pad_token_id
        self.needs_prefix = any(type(p) not in PREFIX_FREE for p in self.processors)
        self._numbers: list[float] = []  # drawn and not yet used, the next one last

    def scores(self, logits: Tensor, prefixes: Prefixes, ended: Sequence[bool] | None = None) -> Tensor:
        """(R, V) logits → (R, V) processed scores, in float32 as `generate()` has them (float64 stays).

        ended (R,): rows that nothing follows, whose scores stay as they are and mean nothing. No processor is asked of
        them: it may know of nothing after the end.
        """
        scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        if not self.needs_prefix:
            for processor in self.processors:
                scores = processor(_no_prefix(scores), scores)
            return scores
        rows, over = self._as_given(prefixes()), list(ended or [False] * len(scores))
        result = scores.clone()
        # A processor takes rows of one length and may know rows by their index: one call a length, of the whole batch.
        for length in sorted({len(row) for row, end in zip(rows, over, strict=True) if not end}):
            own = [i for i, row in enumerate(rows) if len(row) == length and not over[i]]
            ids: Any = torch.tensor([self._evened(rows, i, own, over[i]) for i in range(len(rows))])
            result[own] = self._processed(ids.to(scores.device), scores.clone(), rows, own)[own]
        return result

    def _as_given(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows as the caller would have them: with the padding of their prompts, wherever it is."""
        if self.prompts is None or self.lengths is None:
            return [list(row) for row in rows]
        given = zip(self.prompts, self.lengths, rows, strict=True)
        return [[*prompt, *row[length:]] for prompt, length, row in given]

    def _evened(self, rows: list[list[int]], index: int, own: list[int], ended: bool) -> list[int]:
        """A row as long as those that are asked for: cut, padded behind its end, or one of theirs in its place."""
        length, row = len(rows[own[0]]), rows[index]
        if len(row) >= length:
            return row[:length]
        return [*row, *[self.pad_token_id] * (length - len(row))] if ended else rows[own[0]]

    def _processed(self, ids: Tensor, scores: Tensor, rows: list[list[int]], own: list[int]) -> Tensor:
        """All processors in turn over ids (R, T) and scores (R, V); of rows other than `own` the result means
        nothing."""
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                for i in own:
                    scores[i] = processor.row(i, rows[i], scores[i])
            else:
                scores = processor(ids, scores)
        return scores

    def law(self, logits: Tensor, prefixes: Prefixes = list) -> Tensor:
        """(R, V) logits → p (R, V), rows summing to 1. prefixes() gives each row's ids up to its node, unpadded."""
        return self.law_of(self.scores(logits, prefixes))

    def law_of(self, scores: Tensor) -> Tensor:
        """(R, V) processed scores → p (R, V)."""
        if self.do_sample:
            return scores.softmax(-1)
        return torch.zeros_like(scores).scatter_(-1, likeliest(scores).unsqueeze(-1), 1.0)

    def draft_law(self, logits: Tensor) -> Tensor:
        """(R, V) draft logits → a q (R, V) near the target's law: temperature and truncation applied, no prefix.

        A row whose tokens the processors all rule out is zero.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self.processors:
            if type(processor) in PREFIX_FREE:
                scores = processor(_no_prefix(scores), scores)
        return scores.softmax(-1).nan_to_num_(0)

    def draw(self, p: Tensor) -> Tensor:
        """(R, V) laws, each but for a factor → (R,) one index from each row: all that decoding draws is drawn here.

        At temperature 0 of any shape (…, V).
        """
        if not self.do_sample:
            return likeliest(p)
        if not host.reads(p):
            return torch.multinomial(p, 1, generator=self.generator).squeeze(-1)
        # On a CPU multinomial draws V numbers a row; one number and the running sums take a tenth of the time.
        below = p.cumsum(-1, dtype=torch.float64)
        sums = below.select(1, -1).tolist()
        if not all(0 < total < math.inf for total in sums):
            raise ValueError(f"a law sums to {sums}: the model's logits are not finite numbers")
        # Above 0, where a token without a chance may stand, and at most the whole sum, behind which nothing does.
        places = [[(1 - one) * total] for one, total in zip(self._uniforms(len(sums)), sums, strict=True)]
        return torch.searchsorted(below, torch.tensor(places, dtype=torch.float64)).view(-1)

    def coins(self, chance: Tensor) -> host.Marks:
        """Probabilities (B, N) → which come true: from 1 on surely, and at temperature 0 those above one half."""
        if not self.do_sample:
            return host.marks(chance > 0.5)
        if not host.reads(chance):
            return torch.rand(chance.shape, generator=self.generator, device=chance.device, dtype=chance.dtype) < chance
        return [[one < own for one, own in zip(self._uniforms(len(row)), row, strict=True)] for row in chance.tolist()]

    def coin(self, chance: float) -> bool:
        """Does it come true? As in `coins`."""
        return (self._uniforms(1)[0] if self.do_sample else 0.5) < chance

    def _uniforms(self, count: int) -> list[float]:
        """Numbers in [0, 1) for Python, of which many are drawn at once."""
        if len(self._numbers) < count:
            self._numbers = torch.rand(count + 256, generator=self.generator, dtype=torch.float64).tolist()
        taken = self._numbers[-count:]
        del self._numbers[-count:]
        return taken

    def uniform(self, like: Tensor) -> Tensor:
        """(R, …) → (R,) numbers in [0, 1), at temperature 0 too: for a rule that is random by definition."""
        return torch.rand(len(like), generator=self.generator, device=like.device)
