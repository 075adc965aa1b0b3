"""Matrix products of few rows in a compiled step: few_rows.cpp in the place of the library's, as a pass of torch's
compiler.

The libraries behind `torch.mm` on a CPU take several times as long over a dozen rows as it takes to read the matrix.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._inductor.codecache import CppCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import Arg, CallFunction, Match, PatternMatcherPass, register_graph_pattern

MOST_ROWS = 24  # measured (docs/LOG.md): the library is as fast or faster over more
SOURCE = Path(__file__).with_suffix(".cpp")

aten = torch.ops.aten
_patterns = PatternMatcherPass()


@cache
def load() -> None:
    """Compile the products for this processor, unless torch's cache has them, and tell torch of them.

    Raises: what torch's compiler says if there is no C++ compiler.
    """
    CppCodeCache.load(SOURCE.read_text())
    torch.library.register_fake("specheads::few_rows", lambda rows, weight: rows.new_empty(len(rows), len(weight)))


def pays(match: Match) -> bool:
    """Are there few rows, and is the matrix that of a linear layer?"""
    rows, matrix = (node.meta["val"] for node in match.args[-2:])
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or matrix.stride(0) != 1:
        return False
    return rows.shape[0] <= MOST_ROWS


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (M, K) @ matrix (K, N), which lies in memory as (N, K)."""
    return torch.ops.specheads.few_rows(rows, matrix.t())


@register_graph_pattern(CallFunction(aten.mm.default, Arg(), Arg()), extra_check=pays, pass_dict=_patterns)
def _without_bias(match: Match, rows: Tensor, matrix: Tensor) -> None:
    match.replace_by_example(product, [rows, matrix])


@register_graph_pattern(CallFunction(aten.addmm.default, Arg(), Arg(), Arg()), extra_check=pays, pass_dict=_patterns)
def _with_bias(match: Match, bias: Tensor, rows: Tensor, matrix: Tensor) -> None:
    match.replace_by_example(lambda bias, rows, matrix: bias + product(rows, matrix), [bias, rows, matrix])


class FewRows(CustomGraphPass):
    """Replaces those products in a graph."""

    def __init__(self) -> None:
        load()

    def __call__(self, graph: fx.Graph) -> None:
        _patterns.apply(graph)

    def uuid(self) -> str:
        """Part of the key of compiled code on disk."""
        return f"specheads.few_rows.2:{MOST_ROWS}:{hashlib.sha256(SOURCE.read_bytes()).hexdigest()}"
