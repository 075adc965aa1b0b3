"""Matrix products and attention with few rows in a compiled step: a compiler pass that puts in the kernels of
few_rows.cpp.

On a CPU, the libraries behind `torch.mm` take up to five times as long for few rows as it takes to read the matrix, and
torch's attention up to twice as long as ours for one token a text.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import fx
from torch._inductor.codecache import CppCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass

# Measured (docs/LOG.md): for more rows the library is about as fast. On processors without bfloat16 products in oneDNN,
# torch's own are slower than ours at every size measured.
_ONLY_TORCH = torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
MOST_ROWS, MOST_QUERIES = {torch.float32: 48, torch.bfloat16: 96 if _ONLY_TORCH else 6}, 16
HEAD_PART = 16  # the width of a head must be a multiple of this, the longest vector
SOURCE = Path(__file__).with_suffix(".cpp")

aten = torch.ops.aten


@cache
def load() -> None:
    """Compile the operations for this processor, unless they are in torch's cache, and register them.

    Without a C++ compiler, torch's own error is raised.
    """
    CppCodeCache.load(SOURCE.read_text())
    torch.library.register_fake(
        "specheads::few_rows", lambda rows, matrix, bias=None: rows.new_empty(len(rows), matrix.shape[1])
    )
    torch.library.register_fake("specheads::attention_of_few_rows", lambda query, *others: torch.empty_like(query))


def replace_products(graph: fx.Graph) -> None:
    """Replace products of few rows with the matrix of a linear layer, stored as (N, K)."""
    for product in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=product):
            *bias, rows, matrix = node.args
            left, right = rows.meta["val"], matrix.meta["val"]
            on_cpu = left.device.type == right.device.type == "cpu"
            few = len(left) <= MOST_ROWS.get(left.dtype, 0)
            if on_cpu and few and right.stride(0) == 1 and not node.kwargs:
                node.target, node.args = torch.ops.specheads.few_rows.default, (rows, matrix, *bias)


def replace_attention(graph: fx.Graph) -> None:
    """Replace attention of few queries in float32 under a mask, without dropout."""
    for node in graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default):
        query, key, value, *others = node.args
        options = {"attn_mask": None, "scale": None} | node.kwargs
        mask, scale, shape = options.pop("attn_mask"), options.pop("scale"), query.meta["val"].shape
        known = mask is not None and query.meta["val"].dtype == torch.float32 and not any(others) and not options
        attended = [user for user in node.users if user.args[1] == 0]
        if not known or shape[2] > MOST_QUERIES or shape[3] % HEAD_PART or len(node.users) > len(attended):
            continue
        inputs = (query, key, value, mask, shape[3] ** -0.5 if scale is None else scale)
        with graph.inserting_before(node):
            ours = graph.call_function(torch.ops.specheads.attention_of_few_rows.default, inputs)
        for user in attended:
            ours.meta = user.meta
            user.replace_all_uses_with(ours)
            graph.erase_node(user)
        graph.erase_node(node)


class FewRows(CustomGraphPass):
    """The compiler pass: replaces products and attention in a graph."""

    def __init__(self) -> None:
        load()

    def __call__(self, graph: fx.Graph) -> None:
        replace_products(graph)
        replace_attention(graph)

    def uuid(self) -> str:
        """Part of the key of compiled code on disk."""
        return f"specheads.few_rows.5:{MOST_ROWS}:{MOST_QUERIES}:{hashlib.sha256(SOURCE.read_bytes()).hexdigest()}"
