"""Products of few rows: the pass of torch's compiler replaces those it should, by products of the same value."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.codecache import CppCodeCache
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from specheads.decoding.compiled.few_rows import MOST_ROWS, SOURCE, FewRows, load
from tests.support.compiled_texts import needs_compiler

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
OURS = torch.ops.specheads

pytestmark = needs_compiler


def linear(num_rows, length, width=5, *, bias=False, dtype=torch.float32):
    """Rows (M, K), a weight (N, K), a bias (N,) or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, length), (width, length), (width,)]
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


def assert_product(found, rows, weight, bias=None):
    exact = F.linear(*(None if tensor is None else tensor.double() for tensor in (rows, weight, bias)))
    relative = 2**-8 if found.dtype == torch.bfloat16 else 1e-5  # half of bfloat16's last place
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", MOST_ROWS)
@pytest.mark.parametrize("excess", [None, 0, 1])
def test_products_of_few_rows_become_ours_of_the_same_value(excess, dtype, bias):
    inputs = linear(1 if excess is None else MOST_ROWS[dtype] + excess, 70, bias=bias, dtype=dtype)
    graph, products = after_the_pass(F.linear, *inputs)
    assert bool(products) is (excess == 1)
    found = graph(*inputs)
    assert found.dtype == dtype
    assert_product(found, *inputs)


@pytest.mark.parametrize("dtype", MOST_ROWS)
@pytest.mark.parametrize("num_rows", [0, *range(1, 8), 11, 12, 13])
def test_products_of_all_sizes(num_rows, dtype):
    load()
    for length, width in itertools.product([0, 1, 15, 16, 17, 33, 128], [1, 3, 4, 5, 9]):
        rows, weight, _ = linear(num_rows, length, width, dtype=dtype)
        assert_product(OURS.few_rows(rows, weight.t()), rows, weight)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_of_matrices_worth_several_threads(num_threads):
    load()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows, weight, _ = linear(3, 301, 1003)
        assert_product(OURS.few_rows(rows, weight.t()), rows, weight)
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_part_of_others():
    load()
    rows, weight, _ = linear(6, 40)
    assert_product(OURS.few_rows(rows[::2, 3:20], weight[:, 3:20].t()), rows[::2, 3:20], weight[:, 3:20])


def test_other_types_and_matrices_that_lie_otherwise_are_left_alone():
    for function, inputs in (
        (F.linear, linear(2, 6, dtype=torch.float16)[:2]),
        (torch.mm, (torch.randn(2, 6), torch.randn(6, 5))),
    ):
        assert after_the_pass(function, *inputs)[1]


def test_code_on_disk_is_made_anew_for_other_bounds_and_other_source(monkeypatch, tmp_path):
    before = FewRows().uuid()
    assert FewRows().uuid() == before
    monkeypatch.setitem(MOST_ROWS, torch.bfloat16, 5)
    others = FewRows().uuid()
    assert others != before
    (tmp_path / "few_rows.cpp").write_text("// other")
    monkeypatch.setattr("specheads.decoding.compiled.few_rows.SOURCE", tmp_path / "few_rows.cpp")
    assert FewRows().uuid() not in {before, others}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2")
def test_on_processors_with_narrower_vectors():
    """AVX2 has half of AVX-512's registers and other headers."""
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        CppCodeCache.load(SOURCE.read_text().replace("(specheads,", "(specheads_avx2,"))
    operations = torch.ops.specheads_avx2
    for num_rows, dtype in itertools.product([1, 3, 4, 5, 9], MOST_ROWS):
        rows, weight, _ = linear(num_rows, 70, 11, dtype=dtype)
        assert_product(operations.few_rows(rows, weight.t()), rows, weight)
    query, key, value, mask = (torch.randn(2, 3, *shape) for shape in [(5, 32), (300, 32), (300, 32), (5, 300)])
    exact = F.scaled_dot_product_attention(*(t.double() for t in (query, key, value, mask)), scale=0.5)
    found = operations.attention_of_few_rows(query, key, value, mask, 0.5)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
