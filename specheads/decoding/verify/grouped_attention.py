"""Grouped-query attention without repeating the keys: query heads that share a key head become rows of one product.

transformers' sdpa copies keys and values once per query head, which after 32,000 tokens took six sevenths of a step
over eight nodes (docs/speed.md). Shapes: B batch rows, N tree nodes, L attended slots, d width of a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton_package
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specheads.decoding.kernels import few_rows
from specheads.decoding.verify.hf_base import text_config

NAME = "specheads_grouped"  # in transformers' registry of attention implementations
HAS_TRITON = has_triton_package()  # shipped with torch's GPU builds on Linux
# By whether the pass is compiled: in eager mode launching Triton's kernels costs more than they save on fewer keys.
MIN_KEYS = {True: 1024, False: 16_384}
_blocks: Counter[int] = Counter()  # id of a config → how many threads are in `grouped_heads` with it
_blocks_lock = Lock()


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """query (B, heads, N, d), key and value (B, key heads, L, d), additive mask (B, 1, N or 1, L) → (B, heads, N, d).

    Query head h attends with key head h // (heads / key heads). scale: None for d ** -0.5.
    """
    if HAS_TRITON and can_split(query, key, value, mask):
        from specheads.decoding.verify.split_attention import split_attention, split_attention_in_graph

        scale = query.shape[3] ** -0.5 if scale is None else scale
        if torch.compiler.is_compiling():
            return split_attention_in_graph(query, key, value, mask, scale)
        with torch.cuda.device_of(query):  # Triton launches on the current device
            return split_attention(query, key, value, mask, scale)
    batch, heads, nodes, width = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], shared * nodes, width)
    if mask.shape[2] > 1:  # a mask of one row broadcasts
        mask = mask.repeat(1, 1, shared, 1)
    if few_rows.attends(rows, key, value, mask):
        scale = width**-0.5 if scale is None else scale
        return few_rows.attention(rows, key, value, mask, scale, nodes).reshape(batch, heads, nodes, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, nodes, -1)  # reshape: CUDA's kernels put rows before heads in memory


def has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Is there a kernel of ours for heads that do not share keys?"""
    return few_rows.attends(query, key, value, mask) or (HAS_TRITON and can_split(query, key, value, mask))


def can_split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Can `split_attention` compute this: on a GPU, with dtypes and sizes that it serves, without gradients?"""
    learns = torch.is_grad_enabled() and query.requires_grad
    if not query.is_cuda or learns or not mask.is_floating_point():
        return False
    if key.shape[2] < MIN_KEYS[torch.compiler.is_compiling()]:
        return False
    from specheads.decoding.verify.split_attention import is_served

    rows = query.shape[1] // key.shape[1] * query.shape[2]
    return query.dtype == key.dtype == value.dtype and is_served(
        query.device, query.dtype, rows, query.shape[3], value.shape[3]
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' sdpa; under our masks `grouped_attention`, for heads that share keys and for what has kernels."""
    special = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    mask = None if attention_mask is None or attention_mask.shape[1] > 1 or special else attention_mask
    if mask is None or (query.shape[1] == key.shape[1] and not has_kernel(query, key, value, mask)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return grouped_attention(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_heads(base: PreTrainedModel) -> Iterator[None]:
    """In the block, the base's layers use `grouped_attention` where they would use transformers' sdpa.

    The first thread to enter sets it in the base's config, and the last to leave resets it. A compiled step starts
    inside the block. A base that does not choose its attention by name (Falcon) is left as it is.
    """
    config = text_config(base)
    by_name = config._attn_implementation in ("sdpa", NAME) and getattr(base, "_supports_attention_backend", False)
    if not by_name or torch.compiler.is_compiling():
        yield
        return
    with _blocks_lock:
        _blocks[id(config)] += 1
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks[id(config)] -= 1
            if not _blocks[id(config)]:
                del _blocks[id(config)]
                config._attn_implementation_internal = "sdpa"
