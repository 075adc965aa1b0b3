"""Matrix products of few rows in a compiled step, as code of torch's compiler.

The libraries behind `torch.mm` on a CPU take several times as long over one to eight rows as it takes to read the
matrix. Sums over its rows, which the compiler fuses with what stands beside them, read it once.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import Arg, CallFunction, Match, PatternMatcherPass, register_graph_pattern

# Measured (docs/LOG.md): the library is as fast or faster over more rows, and over long rows of the matrix.
MOST_ROWS, LONGEST = 8, 768
MOST_LONG_ROWS = 2

aten = torch.ops.aten
_patterns = PatternMatcherPass()


def pays(match: Match) -> bool:
    """Are there few rows, and is the matrix that of a linear layer?"""
    rows, matrix = (node.meta["val"] for node in match.args[-2:])
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or matrix.stride(0) != 1:
        return False
    return rows.shape[0] <= (MOST_ROWS if rows.shape[1] <= LONGEST else MOST_LONG_ROWS)


def row_sums(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (M, K) @ matrix (K, N), which lies in memory as (N, K)."""
    weight = matrix.t()
    return torch.stack([(weight * row).sum(-1) for row in rows.unbind()])


@register_graph_pattern(CallFunction(aten.mm.default, Arg(), Arg()), extra_check=pays, pass_dict=_patterns)
def _without_bias(match: Match, rows: Tensor, matrix: Tensor) -> None:
    match.replace_by_example(row_sums, [rows, matrix])


@register_graph_pattern(CallFunction(aten.addmm.default, Arg(), Arg(), Arg()), extra_check=pays, pass_dict=_patterns)
def _with_bias(match: Match, bias: Tensor, rows: Tensor, matrix: Tensor) -> None:
    match.replace_by_example(lambda bias, rows, matrix: bias + row_sums(rows, matrix), [bias, rows, matrix])


class FewRows(CustomGraphPass):
    """Replaces those products in a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        _patterns.apply(graph)

    def uuid(self) -> str:
        """Part of the key of compiled code on disk."""
        return f"specheads.few_rows.1:{MOST_ROWS}:{LONGEST}:{MOST_LONG_ROWS}"
