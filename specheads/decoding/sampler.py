"""Sampler: generation config → the target's law at a node, and every random draw of decoding.

Shapes: R rows (one node of each batch row), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specheads.decoding.processors import RowProcessor, adapted, is_prefix_free
from specheads.decoding.tree import DraftTree

Prefixes = Callable[[], Sequence[Sequence[int]]]


def _no_prefix(scores: Tensor) -> Any:
    """The empty ids (R, 0) that a prefix-free processor is given."""
    return torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)


def likeliest(logits: Tensor, block: int = 128) -> Tensor:
    """argmax over the last of (…, V), the first of equals."""
    if logits.shape[-1] % block or logits.numel() < 256 * block:
        return logits.argmax(-1)
    # The largest of each block first: on a CPU a maximum alone is found several times faster than its index.
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
        self.needs_prefix = not all(map(is_prefix_free, self.processors))
        self.finite = torch.tensor(True)  # have all laws that were drawn from had a finite sum? On their device

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

    def probs(self, logits: Tensor, prefixes: Prefixes = list) -> Tensor:
        """(R, V) logits → p (R, V), rows summing to 1. prefixes() gives each row's ids up to its node, unpadded."""
        return self.probs_of(self.scores(logits, prefixes))

    def probs_of(self, scores: Tensor) -> Tensor:
        """(R, V) processed scores → p (R, V)."""
        if self.do_sample:
            return scores.softmax(-1)
        return torch.zeros_like(scores).scatter_(-1, likeliest(scores).unsqueeze(-1), 1.0)

    def draft_probs(self, logits: Tensor, kinds: Collection[type] | None = None) -> Tensor:
        """(R, V) draft logits → a q (R, V) near the target's law: temperature and truncation applied, no prefix.

        kinds: of the processors that need no prefix, those to apply; None for all. A row whose tokens they all rule out
        is zero.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self.processors:
            if is_prefix_free(processor) if kinds is None else type(processor) in kinds:
                scores = processor(_no_prefix(scores), scores)
        return scores.softmax(-1).nan_to_num_(0)

    def draw(self, p: Tensor, numbers: Tensor | None = None) -> Tensor:
        """(…, V) laws, each but for a factor → (…) one index from each: all that decoding draws is drawn here.

        numbers (…) in [0, 1): which index it is, so that the same law and number give the same one; None: fresh ones.
        A law that sums to no positive finite number clears `finite`, and its index means nothing.
        """
        if not self.do_sample:
            return likeliest(p)
        numbers = self.uniforms(p.shape[:-1], p.device) if numbers is None else numbers
        index, total = inverse_cdf(p, numbers)
        self.note_finite((total > 0) & (total < math.inf))
        return index

    def draw_nodes(self, p: Tensor, tree: DraftTree, numbers: Tensor | None) -> Tensor:
        """(B, N, V) laws → (B, N) a token behind each node of the tree; numbers (B, P): a row's for each depth.

        Most nodes are not reached, and may have any law: of those that are, the caller tells `note_finite`.
        """
        numbers = self.uniforms(p.shape[:-1], p.device) if numbers is None else numbers.gather(1, tree.topology.depth)
        return inverse_cdf(p, numbers)[0]

    def note_finite(self, valid: Tensor) -> None:
        """Clear `finite` unless all are true."""
        self.finite = self.finite.to(valid.device) & valid.all()

    def bernoulli(self, chance: Tensor) -> Tensor:
        """Probabilities (B, N) → which come true: from 1 on surely, and at temperature 0 those above one half."""
        return (self.uniforms(chance.shape, chance.device) if self.do_sample else 0.5) < chance

    def uniforms(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Numbers in [0, 1), at temperature 0 too: some rules are random by definition."""
        return torch.rand(tuple(shape), generator=self.generator, device=device, dtype=_wide(device))


def inverse_cdf(weights: Tensor, numbers: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """weights (…, V) ≥ 0, numbers (…) in [0, 1) → the first index at which the running sum reaches 1 − number of the
    whole, and the whole (…). What has no weight is never the index, which is any of them where the sum is no number.

    Running sums over blocks, and then over one block: a tenth of the time that running sums over all of V take.
    """
    size = weights.shape[-1]
    if missing := -size % block:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.unflatten(-1, (-1, block))
    sums = blocks.sum(-1).cumsum(-1, dtype=numbers.dtype)
    whole = sums[..., -1:]
    aim = (1 - numbers).unsqueeze(-1) * whole  # above 0, so that no index in front of the first weight is found
    which = torch.searchsorted(sums, aim).clamp(max=sums.shape[-1] - 1)
    own = blocks.gather(-2, which.unsqueeze(-1).expand(*which.shape, block)).squeeze(-2)
    own = own.cumsum(-1, dtype=numbers.dtype)
    # Counted from the block's end, so that a sum rounded otherwise never aims behind its last weight.
    aim = (own[..., -1:] - (sums.gather(-1, which) - aim)).clamp_min(torch.finfo(own.dtype).tiny)
    inner = torch.searchsorted(own, aim).clamp(max=block - 1)
    return (which * block + inner).squeeze(-1).clamp(max=size - 1), whole.squeeze(-1)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64
