"""Attention of few queries: ours where it should be, of the same value, and the same whatever rows are beside it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specheads.decoding.kernels.few_rows import MAX_QUERIES, attends, few_row_kernels, few_row_layers, load
from specheads.decoding.verify.grouped_attention import grouped_attention
from tests.support.compiled_texts import needs_compiler

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


def ours(query, key, value, mask, scale=None, last=0):
    load()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return OURS.attention_of_few_rows(query, key, value, mask, scale, last)


def assert_same(found, expected):
    relative, absolute = (2**-8, 1e-4) if found.dtype == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", MAX_QUERIES)
@pytest.mark.parametrize("width", [16, 64, 80])
def test_attention_of_all_sizes(dtype, width):
    for num_rows, num_keys in itertools.product([1, 2, 3, 4, 5, 7, 17, 42], [1, 2, 15, 16, 17, 257, 600, 4200]):
        given = inputs(num_rows, num_keys, width, dtype=dtype)
        for last in {0, min(5, num_keys), num_keys}:
            assert_same(ours(*given, last=last), exact(*given))


@pytest.mark.parametrize("dtype", MAX_QUERIES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(dtype):
    query, key, value, mask = inputs(42, 3500, 64, dtype=dtype)
    together = ours(query, key, value, mask)
    for begin, end in ((0, 1), (0, 5), (3, 10), (20, 42)):
        part = ours(query[:, :, begin:end], key, value, mask[:, :, begin:end])
        assert torch.equal(part, together[:, :, begin:end])


@pytest.mark.parametrize("dtype", MAX_QUERIES)
def test_a_row_has_the_same_bits_whether_its_last_keys_are_in_the_tree_or_committed(dtype):
    """Three last keys in the slots of a tree of seven, among others that are masked, or after the others."""
    query, key, value, mask = inputs(4, 530, 64, dtype=dtype)
    committed = ours(query, key, value, mask)
    slots = [1, 2, 5]
    tree, of_tree = torch.randn(3, 2, 7, 64).to(dtype), torch.full((3, 1, 4, 7), torch.finfo(dtype).min).to(dtype)
    keys, values = (torch.cat([tree, part[:, :, :-3], tree], 2) for part in (key, value))
    keys[:, :, slots], values[:, :, slots] = key[:, :, -3:], value[:, :, -3:]
    masks = torch.cat([of_tree, mask[..., :-3], of_tree], -1)
    masks[..., slots] = mask[..., -3:]
    assert torch.equal(ours(query, keys, values, masks, last=7), committed)
    if dtype == torch.float32:  # bfloat16 rounds the difference off
        assert not torch.equal(ours(query, keys, values, masks, last=0), committed)


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


def block(dtype=torch.float32):
    """A block of `few_row_kernels`."""
    return few_row_kernels(few_row_layers([nn.Linear(3, 3, dtype=dtype)], fewest_bytes=0))


@torch.no_grad()
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_few_queries_is_ours_in_a_block(scale):
    query, key, value, mask = inputs(5, 70, heads=4)
    key, value = key[:, :2], value[:, :2]
    found = grouped_attention(query, key, value, mask, scale)
    with block():
        in_block = grouped_attention(query, key, value, mask, scale)
    shared = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    assert_same(found, exact(query, *shared, mask, scale=scale))
    assert_same(in_block, exact(query, *shared, mask, scale=scale))
    order = ours(query.view(3, 2, 10, 32), key, value, mask.repeat(1, 1, 2, 1), scale, last=5).view(query.shape)
    assert torch.equal(in_block, order)


@torch.no_grad()
@pytest.mark.parametrize("dtype", MAX_QUERIES)
def test_other_attention_is_torchs(dtype):
    few = inputs(MAX_QUERIES[dtype], dtype=dtype)
    assert not attends(*few)
    with block(dtype):
        assert attends(*few)
        assert not attends(*inputs(MAX_QUERIES[dtype] + 1, dtype=dtype))
        assert not attends(*inputs(width=24, dtype=dtype))
        assert not attends(few[0], few[1], few[2][..., :16], few[3])
        assert not attends(*few[:3], few[3] == 0)
        assert not attends(few[0], few[1].half(), *few[2:])
