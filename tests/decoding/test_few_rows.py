"""Products of few rows: by each of the processor's instructions, and the same whatever rows are beside them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.codecache import CppCodeCache

from specheads.decoding.kernels.few_rows import MAX_ROWS, SOURCE, load
from tests.support.compiled_texts import needs_compiler

OURS = torch.ops.specheads

pytestmark = needs_compiler


def linear(num_rows, length, width=5, *, bias=False, dtype=torch.float32):
    """Rows (M, K), a weight (N, K), a bias (N,) or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, length), (width, length), (width,)]
    rows, weight, offset = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weight, offset if bias else None


def int8_linear(num_rows, length, width=5, *, dtype=torch.float32):
    """Rows (M, K), an int8 weight (N, K), its scale (N,), a bias (N,)."""
    rows, weight, bias = linear(num_rows, length, width, bias=True, dtype=dtype)
    narrow = (40 * weight.float()).round().clamp(-127, 127).to(torch.int8)
    return rows, narrow, 0.02 + torch.rand(width, generator=torch.Generator().manual_seed(1)) / 40, bias


def assert_product(found, rows, weight, bias=None):
    exact = F.linear(*(None if tensor is None else tensor.double() for tensor in (rows, weight, bias)))
    relative = 2**-8 if found.dtype == torch.bfloat16 else 1e-5  # half of bfloat16's last place
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=1e-4)


def instructions(*, int8=False):
    """Each dtype of rows with each instruction that multiplies it, by a weight of int8 or of its own dtype."""
    load()
    return [(torch.float32, None), *((torch.bfloat16, name) for name in OURS.instructions(int8))]


def test_products_of_all_sizes_by_all_instructions_whatever_rows_are_beside():
    """A row's result has the same bits in each number of rows: a sum's order depends on the matrix alone."""
    for dtype, by in instructions():
        lengths, widths = [0, 1, 2, 15, 16, 17, 31, 32, 33, 70, 128], [1, 3, 4, 5, 9, 31, 32, 33, 70]
        for length, width in itertools.product(lengths, widths):
            rows, weight, bias = linear(40, length, width, bias=True, dtype=dtype)
            together = OURS.few_rows(rows, weight, bias, by)
            assert_product(together, rows, weight, bias)
            for count in range(34):
                assert torch.equal(OURS.few_rows(rows[:count], weight, bias, by), together[:count]), (by, count)
            assert torch.equal(OURS.few_rows(rows[17:20], weight, bias, by), together[17:20])


def test_products_of_large_matrices_on_one_to_four_threads():
    before = torch.get_num_threads()
    try:
        for dtype, by in instructions():
            rows, weight, bias = linear(19, 301, 1003, bias=True, dtype=dtype)
            found = []
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                found.append(OURS.few_rows(rows, weight, bias, by))
            assert_product(found[0], rows, weight, bias)
            assert all(torch.equal(found[0], other) for other in found[1:])
    finally:
        torch.set_num_threads(before)


def test_rows_and_matrices_that_are_part_of_others():
    for dtype, by in instructions():
        rows, weight, _ = linear(12, 80, 40, dtype=dtype)
        for left, right in (
            (rows[::2, 3:70], weight[:, 3:70]), (rows[:, ::2], weight[::3, ::2]), (rows.view(3, 4, 80), weight),
            (rows.t().contiguous().t(), weight.t().contiguous().t()), (rows[0], weight),
        ):  # fmt: skip
            found = OURS.few_rows(left, right, None, by)
            assert found.shape == (*left.shape[:-1], len(right))
            assert_product(found, left, right)


def test_nan_and_infinity_reach_what_they_enter_and_nothing_else():
    for dtype, by in instructions():
        rows, weight, bias = linear(5, 70, 37, bias=True, dtype=dtype)
        rows[1, 69], rows[2, 3], rows[3, 0] = torch.nan, torch.inf, -torch.inf
        weight[7, 68], weight[36, 3], weight[20] = torch.nan, torch.inf, 0
        found = OURS.few_rows(rows, weight, bias, by).double()
        expected = F.linear(rows.double(), weight.double(), bias.double())
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4, equal_nan=True)


def test_weights_of_int8_by_all_instructions_whatever_rows_are_beside():
    """As the same numbers in float64: odd sizes, rows for more tiles than one pass has, threads, strides, NaN."""
    before = torch.get_num_threads()
    for dtype, by in instructions(int8=True):
        for length, width in itertools.product([0, 1, 31, 32, 33, 64, 70, 130], [1, 3, 31, 33, 70]):
            rows, weight, scale, bias = int8_linear(70, length, width, dtype=dtype)
            together = OURS.few_rows(rows, weight, bias, by, scale)
            assert_product(together, rows, weight.double() * scale.double()[:, None], bias)
            for count in (0, 1, 2, 5, 6, 7, 16, 17, 32, 33, 48, 65):
                found = OURS.few_rows(rows[:count], weight, bias, by, scale)
                assert torch.equal(found, together[:count]), (by, count)
        rows, weight, scale, bias = int8_linear(12, 300, 1003, dtype=dtype)
        try:
            found = []
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                found.append(OURS.few_rows(rows, weight, bias, by, scale))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(found[0], other) for other in found[1:])
        for part in (slice(None, None, 2), slice(3, 70)):
            wide = weight[::3, part].double() * scale[::3, None].double()
            assert_product(OURS.few_rows(rows[:, part], weight[::3, part], None, by, scale[::3]), rows[:, part], wide)
        rows[1, 299], rows[2, 3] = torch.nan, -torch.inf
        weight[7, 3] = 0
        found = OURS.few_rows(rows, weight, bias, by, scale).double()
        expected = F.linear(rows.double(), weight.double() * scale.double()[:, None], bias.double())
        assert torch.equal(found.isfinite(), expected.isfinite()), by
        finite = [row for row in range(12) if row not in (1, 2)]
        torch.testing.assert_close(found[finite], expected[finite], rtol=2**-7, atol=1e-3)


def test_rows_beside_int8_keep_what_is_small_beside_their_largest_element():
    """Rows of all magnitudes, some with an element a thousand times the others: what matters of each is counted."""
    for dtype, by in instructions(int8=True):
        rows, weight, scale, _ = int8_linear(24, 300, 40, dtype=dtype)
        rows *= torch.logspace(-28, 28, 24)[:, None].to(dtype)
        rows[::2, 17] *= 1000
        rows[5] = 0
        wide = weight.double() * scale.double()[:, None]
        exact, largest = F.linear(rows.double(), wide), rows.double().abs().amax(1, keepdim=True)
        error = (OURS.few_rows(rows, weight, None, by, scale).double() - exact).abs()
        assert (error <= 2**-8 * exact.abs() + 2**-20 * largest * wide.abs().sum(1)).all(), by


def test_no_less_accurate_than_torch():
    """In bfloat16, over many elements; the sum of errors, as single ones are rounding."""
    rows, weight, _ = linear(8, 4864, 64, dtype=torch.bfloat16)
    exact = F.linear(rows.double(), weight.double())
    torchs = (F.linear(rows, weight).double() - exact).abs().sum()
    for _, by in instructions()[1:]:
        assert (OURS.few_rows(rows, weight, None, by).double() - exact).abs().sum() <= 1.01 * torchs


def test_what_cannot_be_multiplied_is_refused():
    load()
    rows, weight, _ = linear(2, 6)
    for wrong, message in (
        ((rows[:, :5], weight), "rows of 5 elements by a matrix of 6"),
        ((rows.bfloat16(), weight), "one dtype"),
        ((rows.bfloat16(), weight.bfloat16(), None, "avx9"), "no avx9"),
        ((rows, weight.to(torch.int8)), "int8 has a scale"),
        ((rows, weight, None, None, torch.ones(5)), "no other has"),
        ((rows, weight.to(torch.int8), None, None, torch.ones(4)), "4 numbers for 5 columns"),
        ((rows.half(), weight.half()), "float32 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OURS.few_rows(*wrong)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2")
def test_on_processors_with_narrower_vectors():
    """AVX2 has half of AVX-512's registers and other headers."""
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        CppCodeCache.load(SOURCE.read_text().replace("(specheads,", "(specheads_avx2,"))
    operations = torch.ops.specheads_avx2
    for num_rows, dtype in itertools.product([1, 3, 4, 5, 9], MAX_ROWS):
        rows, weight, _ = linear(num_rows, 70, 11, dtype=dtype)
        found = operations.few_rows(rows, weight)
        assert_product(found, rows, weight)
        assert torch.equal(operations.few_rows(rows[-1:], weight), found[-1:])
        rows, weight, scale, bias = int8_linear(num_rows, 70, 11, dtype=dtype)
        found = operations.few_rows(rows, weight, bias, None, scale)
        assert_product(found, rows, weight.double() * scale.double()[:, None], bias)
    query, key, value, mask = (torch.randn(2, 3, *shape) for shape in [(5, 32), (300, 32), (300, 32), (5, 300)])
    exact = F.scaled_dot_product_attention(*(t.double() for t in (query, key, value, mask)), scale=0.5)
    found = operations.attention_of_few_rows(query, key, value, mask, 0.5)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
