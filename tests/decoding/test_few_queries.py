"""Attention of few queries: the pass of torch's compiler replaces what it should, by attention of the same value."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from specheads.decoding.compiled.few_rows import MOST_QUERIES, FewRows, load
from tests.support.compiled_texts import needs_compiler

TORCHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
OURS = torch.ops.specheads

pytestmark = needs_compiler


def inputs(num_rows=2, num_keys=50, width=32, *, batch=3, heads=2, mask_rows=None, dtype=torch.float32):
    """Queries (B, H, M, d), keys and values (B, H, L, d), and a mask (B, 1, M or 1, L) that forbids a third."""
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_keys)
    shapes = [(batch, heads, count, width) for count in (num_rows, num_keys, num_keys)]
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    drawn = torch.rand((batch, 1, mask_rows or num_rows, num_keys), generator=generator)
    mask = torch.zeros_like(drawn).masked_fill(drawn < 1 / 3, -torch.inf)
    mask[..., -1] = 0.25  # something is left, and what is not forbidden counts as it is
    return query, key, value, mask.to(dtype)


def exact(query, key, value, mask, scale=None):
    return F.scaled_dot_product_attention(*(t.double() for t in (query, key, value)), mask.double(), scale=scale)


def ours(query, key, value, mask, scale=None):
    load()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return OURS.attention_of_few_rows(query, key, value, mask, scale)


def assert_same(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("width", [16, 64, 80])
def test_attention_of_all_sizes(num_rows, width):
    for num_keys in (1, 2, 15, 16, 17, 255, 256, 257, 600):
        given = inputs(num_rows, num_keys, width)
        assert_same(ours(*given), exact(*given))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_scale_and_one_mask_for_all_rows(scale):
    given = inputs(4, 300, mask_rows=1)
    assert_same(ours(*given, scale=scale), exact(*given, scale=scale))


def test_scores_far_apart():
    query, key, value, mask = inputs(2, 600)
    key[:, :, 300] *= 100  # after one part of the keys, before another
    assert_same(ours(query, key, value, mask), exact(query, key, value, mask))


def test_rows_that_may_not_attend_to_the_first_keys_or_to_any():
    query, key, value, mask = inputs(3, 600)
    mask[0, :, 1, :400] = -torch.inf
    mask[1, :, 2] = -torch.inf
    found, expected = ours(query, key, value, mask), exact(query, key, value, mask)
    assert (found[1, :, 2] == 0).all()
    expected[1, :, 2] = 0
    assert_same(found, expected)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("forbidden", [-torch.inf, LOWEST])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_keys_before_the_first_that_is_allowed_and_after_the_last_are_not_read(num_rows, forbidden):
    for begin, end in ((0, 1), (0, 300), (7, 250), (255, 257), (299, 600), (599, 600)):
        query, key, value, mask = inputs(num_rows, 600)
        mask[..., :begin] = mask[..., end:] = forbidden
        mask[:, :, 0, begin], mask[:, :, -1, end - 1] = 0.5, 0.25
        mask[:, :, 1:, end - 1] = mask[:, :, 1:, end - 1].clamp_min(0)  # every row has something
        expected = exact(query, key, value, mask)
        for unread in (slice(0, begin), slice(end, None)):
            key[:, :, unread] = value[:, :, unread] = torch.nan
        assert_same(ours(query, key, value, mask), expected)


def test_a_row_whose_keys_are_all_as_forbidden_mixes_all():
    query, key, value, mask = inputs(3, 600)
    mask[..., 200:] = LOWEST
    mask[1, :, 2] = LOWEST
    found, expected = ours(query, key, value, mask), exact(query, key, value, mask)
    assert_same(found, expected)
    assert_same(found[1, :, 2], value[1].double().mean(1))


def test_tensors_that_are_views_of_others():
    query, key, value, mask = inputs(2, 40, 64)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = torch.cat([key, key], -1)[..., :64]
    value = value.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    found = ours(query, key, value, mask)
    assert found.stride() == query.stride()
    assert_same(found, exact(query, key, value, mask))
    assert_same(ours(query, key.mT.contiguous().mT, value, mask.mT.contiguous().mT), exact(query, key, value, mask))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_heads_on_several_threads(num_threads):
    given = inputs(2, 700, 64, batch=4)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_same(ours(*given), exact(*given))
    finally:
        torch.set_num_threads(before)


def after_the_pass(function, *given):
    """Its graph as the compiler has it, after the pass; and whether torch's attention is left."""
    traced = make_fx(function, tracing_mode="fake")(*given)
    traced.graph.eliminate_dead_code()  # as torch's compiler does
    fake = next(node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder").fake_mode
    assert list(traced.graph.find_nodes(op="call_function", target=TORCHS))
    with V.set_fake_mode(fake):
        FewRows()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, bool(list(traced.graph.find_nodes(op="call_function", target=TORCHS)))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_few_queries_becomes_ours_of_the_same_value(scale):
    given = inputs(MOST_QUERIES, 70)
    graph, left = after_the_pass(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=scale) + 1, *given)
    assert not left
    assert_same(graph(*given) - 1, exact(*given, scale=scale))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (inputs(MOST_QUERIES + 1), {}),
        (inputs(width=24), {}),
        (inputs(dtype=torch.bfloat16), {}),
        (inputs(), {"attn_mask": None}),
        (inputs(), {"attn_mask": None, "is_causal": True}),
    ],
    ids=["more queries", "odd heads", "bfloat16", "no mask", "causal"],
)
def test_other_attention_is_left_alone(given, options):
    def attend(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, **({"attn_mask": mask} | options))

    graph, left = after_the_pass(attend, *given)
    assert left
    torch.testing.assert_close(graph(*given), attend(*given))
