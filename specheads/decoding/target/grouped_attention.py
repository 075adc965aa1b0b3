"""Attention over a long prefix without copies of it: query heads that share a key head become rows of one product.

transformers' sdpa copies keys and values once for each such head, which after 32,000 tokens took six sevenths of a step
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

from specheads.decoding.target.hf_base import text_config

NAME = "specheads_grouped"  # among transformers' attention implementations
HAS_TRITON = has_triton_package()  # it comes with torch's builds for GPUs, on Linux
# By whether the pass is compiled. Else the host takes longer to launch Triton's kernels than they save on fewer keys.
FEWEST_KEYS = {True: 1024, False: 16_384}
_blocks: Counter[int] = Counter()  # by id of a config, how many threads are in `grouped_heads` with it
_counting = Lock()


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """query (B, heads, N, d), key and value (B, key heads, L, d), additive mask (B, 1, N or 1, L) → (B, heads, N, d).

    Query head h attends with key head h // (heads / key heads). scale: None for d ** -0.5.
    """
    if can_split(query, key, value, mask):
        from specheads.decoding.target.split_attention import split_attention, split_attention_in_graph

        scale = query.shape[3] ** -0.5 if scale is None else scale
        if torch.compiler.is_compiling():
            return split_attention_in_graph(query, key, value, mask, scale)
        with torch.cuda.device_of(query):  # Triton launches on the current device
            return split_attention(query, key, value, mask, scale)
    batch, heads, nodes, width = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], shared * nodes, width)
    if mask.shape[2] > 1:  # one row serves all
        mask = mask.repeat(1, 1, shared, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, nodes, -1)  # CUDA's kernels give the rows before the heads


def can_split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Is this for `split_attention`: on a GPU, in types and sizes that it serves, without gradients?"""
    learns = torch.is_grad_enabled() and query.requires_grad
    if not HAS_TRITON or not query.is_cuda or learns or not mask.is_floating_point():
        return False
    if key.shape[2] < FEWEST_KEYS[torch.compiler.is_compiling()]:
        return False
    from specheads.decoding.target.split_attention import is_served

    rows = query.shape[1] // key.shape[1] * query.shape[2]
    return query.dtype == key.dtype == value.dtype and is_served(
        query.device, query.dtype, rows, query.shape[3], value.shape[3]
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' sdpa, but under a mask of ours for heads that share keys, and for all on a GPU."""
    special = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    mask = None if attention_mask is None or attention_mask.shape[1] > 1 or special else attention_mask
    if mask is None or (query.shape[1] == key.shape[1] and not can_split(query, key, value, mask)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return grouped_attention(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_heads(base: PreTrainedModel) -> Iterator[None]:
    """In the block, layers of the base attend by `grouped_attention` where they would by transformers' sdpa.

    The first thread to enter says so in the base's config, and the last to leave takes it back. A compiled step begins
    within the block. A base that does not choose its attention by name (Falcon) is left as it is.
    """
    config = text_config(base)
    by_name = config._attn_implementation in ("sdpa", NAME) and getattr(base, "_supports_attention_backend", False)
    if not by_name or torch.compiler.is_compiling():
        yield
        return
    with _counting:
        _blocks[id(config)] += 1
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _counting:
            _blocks[id(config)] -= 1
            if not _blocks[id(config)]:
                del _blocks[id(config)]
                config._attn_implementation_internal = "sdpa"
