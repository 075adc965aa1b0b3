"""Top-k, and the temperature, top-p and min-p around it, over a shortlist of columns instead of the whole vocabulary.

Of 151,936 columns top-p sorts every one; after a top-k of 50 only some 50 can be kept. They are the same, ties at the
k-th score included. Which of several equal scores at its limit top-p keeps depends in transformers on how the sort was
vectorized; here it is the last of the vocabulary, in batches and trees of any size.
Shapes: R rows, V vocabulary, C candidate columns, S columns of the shortlist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.processors import call

FOLLOWERS = (hf.TemperatureLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)  # read a row's finite scores alone
BLOCK = 128
WIDTH = 64  # the shortlist's is a multiple, so that sums over it round alike in batches of any size


def warp(processors: Sequence[Any], logits: Tensor) -> Tensor:
    """Logits (R, V) → scores (R, V), in float32 or wider, after these processors, none of which needs a prefix."""
    narrow = warp_shortlist(processors, logits)
    if narrow is None:
        scores = at_least_float32(logits)
    else:
        kept, columns, processors = narrow
        scores = kept.new_full(logits.shape, -math.inf).scatter_(1, columns, kept)
    for processor in processors:
        scores = call(processor, no_ids(scores), scores)
    return scores


def warp_shortlist(processors: Sequence[Any], logits: Tensor) -> tuple[Tensor, Tensor, Sequence[Any]] | None:
    """Logits (R, V) → the scores (R, S) at the columns (R, S) that a leading top-k may keep, the others being -inf,
    and the processors that are still to be called. None where there is no such top-k, or no quicker way."""
    first = len(list(takewhile(lambda one: type(one) is hf.TemperatureLogitsWarper, processors)))
    top_k = processors[first] if first < len(processors) else None
    if type(top_k) is not hf.TopKLogitsWarper or top_k.filter_value != -math.inf:
        return None
    columns = shortlist(logits, top_k.top_k)
    if columns is None:
        return None
    end = first + 1 + len(list(takewhile(lambda one: type(one) in FOLLOWERS, processors[first + 1 :])))
    scores = at_least_float32(logits.gather(1, columns))
    for processor in processors[:end]:
        if type(processor) is hf.TopPLogitsWarper:
            scores = top_p(processor, scores)
        else:
            scores = processor(no_ids(scores), scores)
    return scores, columns, processors[end:]


def shortlist(logits: Tensor, k: int) -> Tensor | None:
    """Logits (R, V) → ascending columns (R, S) that hold each row's k highest and all that equal the k-th.

    None where this would not be quicker: on a GPU, in a compiled step, for a small vocabulary, or with too many ties.
    The k highest lie in the k blocks of columns with the highest maxima, and finding maxima is quick.
    """
    size, whole = logits.shape[1], logits.shape[1] // BLOCK * BLOCK
    if not logits.is_cpu or torch.compiler.is_compiling() or whole < 8 * k * BLOCK:
        return None
    maxima = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(2)
    rest = torch.arange(whole, size).expand(len(logits), -1)
    num_blocks = k
    while 4 * num_blocks * BLOCK < whole:
        blocks = maxima.topk(num_blocks).indices.sort().values.unsqueeze(2)
        columns = torch.cat([(blocks * BLOCK + torch.arange(BLOCK)).flatten(1), rest], 1)  # (R, C)
        candidates = logits.gather(1, columns)
        lowest = candidates.topk(k).values[:, -1:]
        needed = int((maxima >= lowest).sum(1).max())
        if needed <= num_blocks:
            width = int((~(candidates < lowest)).sum(1).max())  # not `at least`: NaN is kept, as top-k keeps it
            width = min(-(-width // WIDTH) * WIDTH, columns.shape[1])
            return columns.gather(1, candidates.topk(width).indices.sort().values)
        num_blocks = needed  # columns that equal the k-th lie in other blocks too
    return None


def top_p(processor: hf.TopPLogitsWarper, scores: Tensor) -> Tensor:
    """Scores (R, S) as the processor leaves them, but with a stable sort."""
    ordered, order = scores.sort(stable=True)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - processor.top_p
    dropped[:, -processor.min_tokens_to_keep :] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), processor.filter_value)


def no_ids(scores: Tensor) -> Any:
    """The empty ids (R, 0) to give a processor that needs no prefix."""
    return torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
