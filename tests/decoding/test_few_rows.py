"""Products of few rows: the pass of torch's compiler replaces those it should, by sums of the same value."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from specheads.decoding.few_rows import LONGEST, MOST_LONG_ROWS, MOST_ROWS, FewRows

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def linear(num_rows, length, *, bias=False, dtype=torch.float32):
    """Rows (M, K), a weight (N, K), a bias (N,) or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, length), (5, length), (5,)]
    rows, weight, offset = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weight, offset if bias else None


def after_the_pass(function, *inputs):
    """Its graph as the compiler has it, after the pass; and the products that are left."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    fake = next(node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder").fake_mode
    with V.set_fake_mode(fake):
        FewRows()(traced.graph)
    traced.recompile()
    return traced, [node for node in traced.graph.nodes if node.target in PRODUCTS]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "length", "replaced"),
    [
        (1, 6, True), (MOST_ROWS, 6, True), (MOST_ROWS + 1, 6, False), (MOST_ROWS, LONGEST, True),
        (MOST_LONG_ROWS, LONGEST + 1, True), (MOST_LONG_ROWS + 1, LONGEST + 1, False),
    ],
)  # fmt: skip
def test_products_of_few_rows_become_sums_of_the_same_value(num_rows, length, bias, replaced):
    inputs = linear(num_rows, length, bias=bias)
    graph, products = after_the_pass(F.linear, *inputs)
    assert bool(products) is not replaced
    exact = F.linear(*(None if tensor is None else tensor.double() for tensor in inputs))
    torch.testing.assert_close(graph(*inputs).double(), exact, rtol=1e-4, atol=1e-4)


def test_other_types_and_matrices_that_lie_otherwise_are_left_alone():
    for function, inputs in (
        (F.linear, linear(2, 6, dtype=torch.bfloat16)[:2]),
        (torch.mm, (torch.randn(2, 6), torch.randn(6, 5))),
    ):
        assert after_the_pass(function, *inputs)[1]


def test_code_on_disk_is_made_anew_for_other_bounds(monkeypatch):
    before = FewRows().uuid()
    assert FewRows().uuid() == before
    monkeypatch.setattr("specheads.decoding.few_rows.MOST_ROWS", MOST_ROWS + 1)
    assert FewRows().uuid() != before
