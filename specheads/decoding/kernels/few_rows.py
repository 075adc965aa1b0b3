"""Matrix products and attention with few rows on a CPU, by the operations of few_rows.cpp.

The libraries behind torch take up to three times as long for few rows (docs/speed.md). In a block of
`few_row_kernels`, linear layers call ours instead, in passes that run there and in graphs that are traced there. Sums
are of float32, and a row's result is the same, bit for bit, whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock, local
from types import MethodType
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

logger = logging.get_logger(__name__)
OURS = torch.ops.specheads  # the operations, after `load`

SOURCE = Path(__file__).with_suffix(".cpp")
HAS_AMX, HAS_PAIRS = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
# Measured (docs/speed.md): for more rows the library is about as fast. On processors without bfloat16 products in
# oneDNN, torch's own are slower than ours at every size measured.
_ONLY_TORCH = torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
MAX_ROWS = {
    torch.float32: 48,
    torch.bfloat16: 128 if HAS_AMX else 32 if HAS_PAIRS else 96 if _ONLY_TORCH else 6,
}
MAX_QUERIES = {torch.float32: 16, torch.bfloat16: 128}
HEAD_PART = 16  # the width of a head must be a multiple of this, the longest vector
# Of all linear layers: a smaller model stays in the processor's caches, and is not worth the build.
MIN_BYTES = 2**26


class _Thread(local):
    """active: this thread is in a block of `few_row_kernels`."""

    active = False


_thread = _Thread()
_lock = RLock()
_blocks: dict[nn.Module, int] = {}  # routed linear layers: how many blocks they are in


@cache
def load() -> None:
    """Compile the operations for this processor, unless they are in torch's cache, and register them.

    Without a C++ compiler, torch's own error is raised.
    """
    from torch._inductor.codecache import CppCodeCache  # imports torch's compiler

    def announce(build: object) -> None:
        logger.warning("building kernels for this processor: once, some 15 s on an idle core; torch keeps them on disk")

    # torch's key has the flags of the compiler, but not the processor for which "native" stands.
    source = f"// {torch.backends.cpu.get_cpu_capability()} {HAS_AMX=} {HAS_PAIRS=}\n{SOURCE.read_text()}"
    CppCodeCache.load_async(source, submit_fn=announce)()
    torch.library.register_fake(
        "specheads::few_rows",
        lambda rows, weight, bias=None, by=None, scale=None: rows.new_empty(*rows.shape[:-1], weight.shape[0]),
    )
    torch.library.register_fake("specheads::attention_of_few_rows", lambda query, *others: torch.empty_like(query))


@cache
def available() -> bool:
    """Can the operations be built here, and do they give the right product? If not, one line in the log says why."""
    try:
        load()
        generator = torch.Generator().manual_seed(0)
        rows, weight = (torch.randn(count, 70, generator=generator) for count in (3, 37))
        error = max(
            float((OURS.few_rows(rows.to(dtype), weight.to(dtype)).float() - rows @ weight.T).abs().max())
            for dtype in MAX_ROWS
        )
        problem = "" if error < 0.5 else f"their products are wrong by {error:.1g}"
    except Exception as failure:
        problem = next((line.strip() for line in str(failure).split("\n") if line.strip()), type(failure).__name__)
    if problem:
        logger.warning("passes over few tokens run with torch's own products, without our kernels: %s", problem)
    return not problem


def few_row_layers(modules: Iterable[nn.Module], *, fewest_bytes: int | None = None) -> list[nn.Linear]:
    """The linear layers of these modules whose products can be ours: none without a compiler, or if all their weights
    have fewer bytes (None: MIN_BYTES). Loads the operations, built if need be.

    Layers with `few_rows_inside` call ours by themselves (`Int8Linear`)."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    layers = [part for part in parts if _can_be_ours(part)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    fewest = MIN_BYTES if fewest_bytes is None else fewest_bytes
    return layers if layers and size >= fewest and available() else []


@contextmanager
def few_row_kernels(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """In the block, this thread's products of few rows in these layers of `few_row_layers`, and its attention over few
    rows through `attention`, are ours: in passes that run there and in graphs that are traced there. Not with autocast
    or gradients, nor without layers.

    Other threads run the same layers as before.
    """
    if not layers or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        yield
        return
    before = _thread.active
    with _lock:
        routed = [layer for layer in layers if type(layer).forward is nn.Linear.forward]
        for layer in routed:
            _blocks[layer] = _blocks.get(layer, 0) + 1
            vars(layer)["forward"] = MethodType(forward, layer)
    _thread.active = True
    try:
        yield
    finally:
        _thread.active = before
        with _lock:
            for layer in routed:
                _blocks[layer] -= 1
                if not _blocks[layer]:
                    del _blocks[layer]
                    vars(layer).pop("forward", None)


def is_active() -> bool:
    """Is this thread in a block of `few_row_kernels`?"""
    return _thread.active


def _can_be_ours(module: nn.Module) -> TypeGuard[nn.Linear]:
    if getattr(module, "few_rows_inside", False):
        return module.weight.device.type == "cpu"
    if type(module).forward is not nn.Linear.forward:
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype in MAX_ROWS
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and is_own_forward(vars(module).get("forward"))
    )


def is_own_forward(replaced: object) -> bool:
    """Is this attribute of a module none, or ours? Others (accelerate's, of an offloaded layer) stay."""
    return replaced is None or getattr(replaced, "__func__", None) is forward


def forward(self: nn.Linear, rows: Tensor) -> Tensor:
    """nn.Linear.forward of a layer in a block."""
    weight = self.weight
    most = MAX_ROWS[weight.dtype] if _thread.active and rows.dtype == weight.dtype else 0
    if rows.numel() > most * weight.shape[1]:
        return F.linear(rows, weight, self.bias)
    return OURS.few_rows.default(rows, weight, self.bias)


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Is attention with the arguments of `attention` ours here and now?"""
    return (
        _thread.active
        and query.device.type == "cpu"
        and query.shape[2] <= MAX_QUERIES.get(query.dtype, 0)
        and query.dtype == key.dtype == value.dtype
        and mask.is_floating_point()
        and query.shape[3] == value.shape[3]
        and query.shape[3] % HEAD_PART == 0
    )


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, last: int) -> Tensor:
    """query (B, heads, rows, d), key and value (B, heads, L, d), additive mask (B, 1, rows or 1, L) → like query.

    The first `last` keys, slots of a tree, are summed after the others: so a token weighs in at the same point of a sum
    whether it is in the tree or committed already."""
    return OURS.attention_of_few_rows.default(query, key, value, mask, scale, min(last, key.shape[2]))
