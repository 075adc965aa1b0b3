"""Attention of a tree's few rows over many keys on a GPU: the keys are split over its multiprocessors, and the partial
results are merged by log-sum-exp (Flash-Decoding, https://pytorch.org/blog/flash-decoding).

torch's kernels split only the rows, so that one multiprocessor works through the whole text for each key head. Written
in Triton. Shapes: B batch rows, N tree nodes, L attended slots, d width of a head; rows: the N nodes of all query heads
that share a key head.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

BLOCK = 64  # keys that a program reads together
MAX_ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}  # per program
PROGRAMS = 256  # in all, if there are enough keys: about two for each multiprocessor of a large GPU
MAX_PARTS = 64  # into which the keys of one head are split
MAX_WIDTH = 256  # of a head
WARPS, STAGES = 4, 2
TOLERANCE = 0.02  # relative error in norm; half-precision products reach 0.003
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@torch.compiler.assume_constant_result  # called while torch traces a graph, too
def is_served(device: torch.device, dtype: torch.dtype, rows: int, width: int, value_width: int) -> bool:
    """Does `split_attention` run and give the right result for such tensors on this device? Tested once on small ones.

    If not, one line in the log says why: Triton needs a C compiler, and a GPU with enough shared memory.
    """
    if dtype not in MAX_ROWS or max(width, value_width) > MAX_WIDTH:
        return False
    return _is_right(device, dtype, rows_at_once(dtype, rows), width, value_width)


@cache
def _is_right(device: torch.device, dtype: torch.dtype, rows: int, width: int, value_width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    keys, scale = 3 * BLOCK + 8, width**-0.5
    shapes = ((rows, width), (keys, width), (keys, value_width))
    query, key, value = (torch.randn(1, 2, *shape, generator=generator).to(device, dtype) for shape in shapes)
    mask = torch.zeros(1, 1, rows, keys)
    mask[torch.rand(mask.shape, generator=generator) < 0.5] = torch.finfo(dtype).min
    mask = mask.to(device, dtype)
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), mask.float(), scale=scale)
    try:
        with torch.no_grad(), torch.cuda.device_of(mask):
            out = split_attention(query, key, value, mask, scale)
            error = float((out.float() - expected).norm() / expected.norm())
    except Exception as failure:
        problem = str(failure).strip().split("\n")[0] or type(failure).__name__
    else:
        if error < TOLERANCE:
            return True
        problem = f"it was wrong by {error:.0e} of {dtype}"
    logger.warning("attention over long texts is torch's own on %s, which is slower than Triton's: %s", device, problem)
    return False


def rows_at_once(dtype: torch.dtype, rows: int) -> int:
    """How many rows one program serves, if `rows` share a key head."""
    return max(16, min(MAX_ROWS[dtype], triton.next_power_of_2(rows)))


def split_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query (B, heads, N, d), key (B, key heads, L, d) and value (B, key heads, L, e), additive mask (B or 1, 1, N or
    1, L) → (B, heads, N, e), contiguous as (B, N, heads, e).

    Query head h attends with key head h // (heads / key heads). A query that sees no key gives zeros. Products
    accumulate, and the softmax is computed, in float32.
    """
    query, key, value, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, mask))
    batch, heads, nodes, width = query.shape
    key_heads, keys = key.shape[1:3]
    shared = heads // key_heads
    rows = shared * nodes
    block_rows = rows_at_once(query.dtype, rows)
    row_blocks = triton.cdiv(rows, block_rows)
    parts = min(MAX_PARTS, max(1, PROGRAMS // (batch * key_heads * row_blocks)), triton.cdiv(keys, BLOCK))
    part = triton.cdiv(triton.cdiv(keys, parts), BLOCK) * BLOCK
    parts = triton.cdiv(keys, part)
    found = query.new_empty((batch * key_heads, parts, rows, value.shape[3]), dtype=torch.float32)
    weight = query.new_empty((batch * key_heads, parts, rows), dtype=torch.float32)
    out = query.new_empty(batch, nodes, heads, value.shape[3])
    mask = mask.expand(batch, 1, nodes, keys)
    widths = (width, value.shape[3], *(max(16, triton.next_power_of_2(size)) for size in (width, value.shape[3])))
    _attend_part[(parts, batch * key_heads, row_blocks)](
        query, key, value, mask, found, weight, scale, torch.finfo(mask.dtype).min, key_heads, shared, nodes, keys,
        part, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2), *widths,
        block_rows, BLOCK, "ieee" if query.dtype == torch.float32 else "tf32", num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _merge_parts[(rows, batch * key_heads)](
        found, weight, out, key_heads, shared, nodes, parts, value.shape[3], widths[3], MAX_PARTS
    )
    return out.transpose(1, 2)


def _like_split_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3]).transpose(1, 2)


# In a graph it is one opaque operation: recompiled by torch's compiler, the kernels failed on an H200 (torch 2.11).
split_attention_in_graph = torch.library.custom_op(
    "specheads::split_attention", split_attention, mutates_args=(), schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor"
    ),
)  # fmt: skip
split_attention_in_graph.register_fake(_like_split_attention)


@triton.jit
def _attend_part(
    query, key, value, mask, found, weight, scale, unseen, key_heads, shared, nodes, keys, part,
    query_batch, query_head, query_node, key_batch, key_head, key_slot, value_batch, value_head, value_slot,
    mask_batch, mask_node, width: tl.constexpr, value_width: tl.constexpr, padded: tl.constexpr,
    value_padded: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """For one part of a key head's keys: the softmax-weighted mean of their values, and the log of the softmax's
    denominator."""
    first, last = tl.program_id(0) * part, min(tl.program_id(0) * part + part, keys)
    head, rows = tl.program_id(1), shared * nodes
    batch, key_head_index = (head // key_heads).to(tl.int64), (head % key_heads).to(tl.int64)
    row = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    node, query_head_index = row % nodes, key_head_index * shared + row // nodes
    column, value_column, slot = tl.arange(0, padded), tl.arange(0, value_padded), tl.arange(0, block)
    queries = tl.load(
        query + batch * query_batch + query_head_index[:, None] * query_head + node[:, None] * query_node + column,
        mask=(row[:, None] < rows) & (column < width), other=0.0,
    )  # fmt: skip
    masks = mask + batch * mask_batch + node[:, None] * mask_node + slot
    # Skip keys that no row sees: a text is shorter than its cache, and a window shorter than a text.
    begin, end = last, first
    for start in range(first, last, block):
        bias = tl.load(masks + start, mask=start + slot < last, other=unseen).to(tl.float32)
        if tl.max(bias) > unseen:
            begin, end = min(begin, start), start + block
    largest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    mixed = tl.zeros([block_rows, value_padded], tl.float32)
    keys_of_head = key + batch * key_batch + key_head_index * key_head
    values_of_head = value + batch * value_batch + key_head_index * value_head
    for start in range(begin, end, block):
        at = (start + slot).to(tl.int64)
        inside = at < last
        k = tl.load(
            keys_of_head + at[None, :] * key_slot + column[:, None],
            mask=inside[None, :] & (column[:, None] < width), other=0.0,
        )  # fmt: skip
        bias = tl.load(masks + start, mask=inside[None, :], other=unseen).to(tl.float32)
        scores = tl.dot(queries, k, input_precision=precision) * scale + bias
        scores = tl.where(bias > unseen, scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2((scores - shift[:, None]) * LOG2_E)
        shrink = tl.exp2((largest - shift) * LOG2_E)
        v = tl.load(
            values_of_head + at[:, None] * value_slot + value_column,
            mask=inside[:, None] & (value_column < value_width), other=0.0,
        )  # fmt: skip
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
        total, largest = total * shrink + tl.sum(p, 1), highest
    saw = total > 0
    index = (head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * rows + row
    tl.store(weight + index, tl.where(saw, largest + tl.log(tl.where(saw, total, 1.0)), float("-inf")), mask=row < rows)
    tl.store(
        found + index[:, None] * value_width + value_column, mixed / tl.where(saw, total, 1.0)[:, None],
        mask=(row[:, None] < rows) & (value_column < value_width),
    )  # fmt: skip


@triton.jit
def _merge_parts(
    found, weight, out, key_heads, shared, nodes, parts, value_width: tl.constexpr, value_padded: tl.constexpr,
    most_parts: tl.constexpr,
):  # fmt: skip
    """For one row: the mean of its parts' results, weighted by their softmax denominators."""
    row, head, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), shared * nodes
    part, column = tl.arange(0, most_parts), tl.arange(0, value_padded)
    index = (head * parts + part) * rows + row
    logs = tl.load(weight + index, mask=part < parts, other=float("-inf"))
    highest = tl.max(logs, 0)
    weights = tl.exp(logs - tl.where(highest == float("-inf"), 0.0, highest))
    means = tl.load(
        found + index[:, None] * value_width + column,
        mask=(part[:, None] < parts) & (column < value_width), other=0.0,
    )  # fmt: skip
    total = tl.sum(weights, 0)
    mean = tl.sum(means * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    query_head = (head % key_heads) * shared + row // nodes
    written = ((head // key_heads) * nodes + row % nodes) * key_heads * shared + query_head
    tl.store(out + written * value_width + column, mean, mask=column < value_width)
