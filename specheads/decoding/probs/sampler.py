"""Sampler: generation config → the target's probabilities p at a node, and every random draw of decoding;
RowSampler for rows with processors of their own.

Shapes: B batch rows, N tree nodes, P = depth of the tree + 1, R rows (one node of each batch row), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.processors import RowProcessor, adapt, call, is_foreign, is_prefix_free, mixes_rows
from specheads.decoding.probs.randomness import RowNumbers, row_seeds
from specheads.decoding.probs.shortlist import warp, warp_shortlist
from specheads.decoding.tree import DraftTree

Prefixes = Callable[[], Sequence[Sequence[int]]]
FIRST_NUMBERS = 1024  # how many numbers that draw tokens are made at first, for each row


def likeliest(logits: Tensor, block: int = 128) -> Tensor:
    """argmax over the last dimension of (…, V), the first on ties."""
    if logits.shape[-1] % block or logits.numel() < 256 * block:
        return logits.argmax(-1)
    # First the maximum of each block: on a CPU amax is several times faster than argmax.
    blocks = logits.unflatten(-1, (-1, block))
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    within = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, block)).argmax(-1)
    return (best * block + within).squeeze(-1)


class Sampler:
    """The target's probabilities p under HF logits processors, and the source of all random numbers.

    Temperature 0 (do_sample=False) is a one-hot p, so greedy decoding needs no path of its own anywhere else.
    numbers: the rows', from their seeds, set by `seed_rows`. Before that numbers come from the generator.
    rows_together: is each processor given all rows in one call?
    """

    rows_together = True

    numbers: RowNumbers | None = None
    _token_numbers: Tensor | None = None  # (B, T) for the first T tokens of each row

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        *,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        seeds: Sequence[int] | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        lengths: Sequence[int] | None = None,
        pad_token_id: int = 0,
    ) -> None:
        """prompts: each row as the caller gave it, padding included, for processors to see; lengths: without padding.
        pad_token_id: fills rows that have ended. seeds: one a row; None: drawn from the generator (default: torch's
        global one) in `seed_rows`. ValueError for a processor that cannot judge drafts.
        """
        self.processors = adapt(processors or ())
        self.do_sample, self.generator, self.seeds = do_sample, generator, seeds
        self.prompts, self.lengths, self.pad_token_id = prompts, lengths, pad_token_id
        self.needs_prefix = not all(map(is_prefix_free, self.processors))
        self.finite = torch.tensor(True)  # on the device: has every distribution drawn from had a finite sum?

    def scores(self, logits: Tensor, prefixes: Prefixes, ended: Sequence[bool] | None = None) -> Tensor:
        """(R, V) logits → (R, V) processed scores, in float32 as `generate()` has them (float64 stays).

        prefixes() gives each row's ids up to its node, unpadded. ended (R,): rows that nothing follows. Processors are
        not applied to them, since one may not know what follows an end; their scores are meaningless.
        """
        if not self.needs_prefix:
            return warp(self.processors, logits)
        scores = at_least_float32(logits)
        rows, is_over = self._with_padding(prefixes()), list(ended or [False] * len(scores))
        result = scores.clone()
        # Processors take rows of one length, and may identify rows by index: one call per length, with the whole batch.
        for length in sorted({len(row) for row, over in zip(rows, is_over, strict=True) if not over}):
            selected = [i for i, row in enumerate(rows) if len(row) == length and not is_over[i]]
            ids: Any = torch.tensor([self._fit_length(rows, i, selected, is_over[i]) for i in range(len(rows))])
            result[selected] = self._process(ids.to(scores.device), scores.clone(), rows, selected)[selected]
        return result

    def _with_padding(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows as the caller has them: with the padding of their prompts, wherever it is."""
        if self.prompts is None or self.lengths is None:
            return [list(row) for row in rows]
        parts = zip(self.prompts, self.lengths, rows, strict=True)
        return [[*prompt, *row[length:]] for prompt, length, row in parts]

    def _fit_length(self, rows: list[list[int]], index: int, selected: list[int], ended: bool) -> list[int]:
        """A row made as long as the selected ones: cut, padded if it has ended, else replaced by one of them."""
        length, row = len(rows[selected[0]]), rows[index]
        if len(row) >= length:
            return row[:length]
        return [*row, *[self.pad_token_id] * (length - len(row))] if ended else rows[selected[0]]

    def _process(self, ids: Tensor, scores: Tensor, rows: list[list[int]], selected: list[int]) -> Tensor:
        """Apply all processors to ids (R, T) and scores (R, V); only the selected rows of the result are meaningful."""
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                for i in selected:
                    scores[i] = processor.row(i, rows[i], scores[i])
            else:
                scores = call(processor, ids, scores)
        return scores

    def mixing(self, logits: Tensor, prefixes: Prefixes, active: Sequence[bool]) -> list[Any]:
        """The processors of unknown kinds that mix rows, on logits (R, V). active (R,): the others have ended."""
        if not any(map(is_foreign, self.processors)) or sum(active) < 2:
            return []
        rows, found = self._with_padding(prefixes()), []
        selected = [row for row, takes_part in enumerate(active) if takes_part]
        rows = [row if takes_part else rows[selected[0]] for row, takes_part in zip(rows, active, strict=True)]
        width = min(map(len, rows))
        ids: Any = torch.tensor([row[-width:] for row in rows], device=logits.device)
        scores = at_least_float32(logits)
        for processor in self.processors:
            if isinstance(processor, RowProcessor):
                scores = scores.clone()
                for i in selected:
                    scores[i] = processor.row(i, rows[i], scores[i])
                continue
            processed = call(processor, ids, scores.clone())
            if is_foreign(processor) and mixes_rows(processor, ids, scores, processed, selected):
                found.append(processor)
            scores = processed
        return found

    def probs(self, logits: Tensor, prefixes: Prefixes = list) -> Tensor:
        """(R, V) logits → p (R, V), each row summing to 1. prefixes: as in `scores`."""
        return self.probs_of(self.scores(logits, prefixes))

    def probs_of(self, scores: Tensor) -> Tensor:
        """(R, V) processed scores → p (R, V): softmax, or one-hot at temperature 0."""
        if self.do_sample:
            return scores.softmax(-1)
        return torch.zeros_like(scores).scatter_(-1, likeliest(scores).unsqueeze(-1), 1.0)

    def draft_probs(self, logits: Tensor, kinds: Collection[type] | None = None) -> Tensor:
        """(R, V) draft logits → q (R, V), made like p but without prefixes: temperature and truncation alone.

        kinds: the types of processors to apply; None for all that need no prefix. A row in which they rule out every
        token is zero.
        """
        chosen = [
            processor
            for processor in self.processors
            if (is_prefix_free(processor) if kinds is None else type(processor) in kinds)
        ]
        return warp(chosen, logits).softmax(-1).nan_to_num_(0)

    def seed_rows(self, batch: int, device: torch.device) -> None:
        """Set up the random numbers of a batch's rows."""
        seeds = self.seeds
        if seeds is None and (self.do_sample or self.generator is not None):
            where = "cpu" if self.generator is None else self.generator.device
            seeds = row_seeds(int(torch.randint(2**62, (), generator=self.generator, device=where)), batch)
        self.numbers = None if seeds is None else RowNumbers.from_seeds(seeds, device)
        self._token_numbers = None

    def reseed_rows(self, rows: Tensor, seeds: Sequence[int] | None) -> None:
        """New prompts with these seeds have replaced these rows (R,)."""
        if self.numbers is None:
            return
        if seeds is None:
            raise ValueError("new rows of a sampled batch need seeds of their own")
        self.numbers.replace_rows(rows, RowNumbers.from_seeds(seeds, rows.device))
        self._token_numbers = None

    def token_numbers(self, count: Tensor, width: int, most: int) -> Tensor | None:
        """(B, width) the numbers that draw each row's next tokens, after count (B,) ≤ `most` tokens; None if nothing is
        sampled."""
        if self.numbers is None or not self.do_sample:
            return None
        # One look-up a step, in a table that grows with the texts, so a high token limit costs no memory.
        if self._token_numbers is None or self._token_numbers.shape[1] < most + width:
            self._token_numbers = self.numbers.tokens(max(FIRST_NUMBERS, 2 * (most + width)))
        index = count.unsqueeze(1) + torch.arange(width, device=count.device)
        return self._token_numbers.gather(1, index)

    def begin(self, use: int, position: Tensor) -> None:
        """Numbers from here on are for this use, `DRAFT` or `ACCEPT`, after `position` (B,) output tokens."""
        if self.numbers is not None:
            self.numbers.begin(use, position)

    def draw(self, p: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Unnormalised distributions (…, V) → (…) an index drawn from each; at temperature 0 the likeliest.

        numbers (…) in [0, 1) choose the index, so that the same p and number give the same one; None: fresh ones.
        A p whose sum is not positive and finite clears `finite`, and its index is meaningless.
        """
        if not self.do_sample:
            return likeliest(p)
        numbers = self.uniforms(p.shape[:-1], p.device) if numbers is None else numbers
        index, total = inverse_cdf(p, numbers)
        self.note_finite((total > 0) & (total < math.inf))
        return index

    def draw_nodes(
        self, logits: Tensor, tree: DraftTree, numbers: Tensor | None, p: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """logits (B, N, V) → (B, N) a token drawn after each node of the tree, and (B, N) whether its p has a finite
        sum; numbers (B, P): each row's, by depth; p (B, N, V): if it is known, or not that of the logits.

        Most nodes are never reached, and their p may be anything: the caller passes those that are to `note_finite`.
        """
        numbers = None if numbers is None else numbers.gather(1, tree.topology.depth)
        if p is not None:
            tokens, total = inverse_cdf(p, self.uniforms(p.shape[:-1], p.device) if numbers is None else numbers)
            return tokens, (total > 0) & (total < math.inf)
        tokens, finite = self.draw_from_logits(logits.flatten(0, 1), None if numbers is None else numbers.flatten())
        return tokens.view_as(tree.tokens), finite.view_as(tree.tokens)

    def draw_from_logits(self, logits: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (R, V) of rows under processors that need no prefix → (R,) a token drawn from each row's p with its
        number (R,), as `draw` does, and (R,) whether that p has a finite sum."""
        if not self.do_sample:
            token = likeliest(warp(self.processors, logits) if self.processors else logits)
            return token, ~logits.gather(1, token.unsqueeze(1)).squeeze(1).isnan()
        numbers = self.uniforms(logits.shape[:1], logits.device) if numbers is None else numbers
        narrow = warp_shortlist(self.processors, logits)
        if narrow is None or narrow[2]:
            token, total = inverse_cdf(self.probs_of(warp(self.processors, logits)), numbers)
        else:
            scores, columns, _ = narrow
            index, total = inverse_cdf(scores.softmax(-1), numbers)
            token = columns.gather(1, index.unsqueeze(1)).squeeze(1)
        return token, (total > 0) & (total < math.inf)

    def note_finite(self, valid: Tensor) -> None:
        """Clear `finite` unless all of `valid` is true."""
        self.finite = self.finite.to(valid.device) & valid.all()

    def bernoulli(self, chance: Tensor) -> Tensor:
        """Probabilities (B, N) → bool (B, N), True with that probability; at temperature 0 where it exceeds 1/2."""
        return (self.uniforms(chance.shape, chance.device) if self.do_sample else 0.5) < chance

    def uniforms(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1); random at temperature 0 too, since some rules are random by definition."""
        if self.numbers is not None:
            return self.numbers.next(shape).to(device)
        return torch.rand(tuple(shape), generator=self.generator, device=device, dtype=_widest_float(device))


def inverse_cdf(weights: Tensor, numbers: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """weights (…, V) ≥ 0, numbers (…) in [0, 1) → the first index whose cumulative sum reaches (1 − number) · total,
    and the total (…). An index of weight 0 is never drawn; if the total is NaN the index is meaningless.

    Cumulative sums over blocks, then within one block, take a tenth of the time of those over all of V.
    """
    size = weights.shape[-1]
    if missing := -size % block:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.unflatten(-1, (-1, block))
    sums = blocks.sum(-1).cumsum(-1, dtype=numbers.dtype)
    total = sums[..., -1:]
    aim = (1 - numbers).unsqueeze(-1) * total  # above 0, so that leading zero weights are never chosen
    index = torch.searchsorted(sums, aim).clamp(max=sums.shape[-1] - 1)
    inner = blocks.gather(-2, index.unsqueeze(-1).expand(*index.shape, block)).squeeze(-2)
    inner = inner.cumsum(-1, dtype=numbers.dtype)
    # Counted from the block's end, so that a sum rounded differently never aims past the block's last weight.
    aim = (inner[..., -1:] - (sums.gather(-1, index) - aim)).clamp_min(torch.finfo(inner.dtype).tiny)
    within = torch.searchsorted(inner, aim).clamp(max=block - 1)
    return (index * block + within).squeeze(-1).clamp(max=size - 1), total.squeeze(-1)


def _widest_float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


class RowSampler(Sampler):
    """A `Sampler` whose rows have processors of their own, all made from the same options, each called as for a batch
    of that row alone: without padding, and with its own prompt's length if a processor depends on one.

    If none needs a prefix they are the same in all rows, and are called for all rows at once.
    """

    rows_together = False

    def __init__(
        self, processors: Sequence[LogitsProcessorList], indices: Sequence[int], *, do_sample: bool,
        seeds: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """processors: each row's; indices: each row's index, for processors that are given it."""
        super().__init__(processors[0], do_sample=do_sample, seeds=seeds)
        self.rows: list[tuple[int, list[Any]]] = [
            (index, adapt(own)) for index, own in zip(indices, processors, strict=True)
        ]

    def replace_row(self, row: int, processors: LogitsProcessorList, index: int) -> None:
        self.rows[row] = index, adapt(processors)

    def scores(self, logits: Tensor, prefixes: Prefixes, ended: Sequence[bool] | None = None) -> Tensor:
        if not self.needs_prefix:
            return super().scores(logits, prefixes, ended)
        result = at_least_float32(logits).clone()
        for row, prefix in enumerate(prefixes()):
            if not (ended and ended[row]):
                result[row] = self._process_row(row, list(prefix), result[row : row + 1].clone())
        return result

    def _process_row(self, row: int, prefix: list[int], scores: Tensor) -> Tensor:
        """Scores (1, V) of one row after its prefix → processed scores (V,)."""
        index, processors = self.rows[row]
        ids: Any = torch.tensor([prefix], device=scores.device)
        for processor in processors:
            if isinstance(processor, RowProcessor):
                scores = processor.row(index, prefix, scores[0]).unsqueeze(0)
            else:
                scores = processor(ids, scores)
        return scores[0]
