"""Attention split over the keys equals torch's in float64: on a GPU, or on a CPU by Triton's interpreter.

`pip install triton` where there is no GPU: torch brings it with its builds for GPUs alone.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager
from torch.library import opcheck

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from specheads.decoding.tree import DraftTree
from specheads.decoding.verify import grouped_attention as dispatch
from specheads.decoding.verify import split_attention as kernels
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.split_attention import BLOCK, split_attention
from tests.support.tiny_models import tiny_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies matrices of bfloat16 wrongly.
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3} | ({torch.bfloat16: 1e-2} if DEVICE == "cuda" else {})


def inputs(heads, key_heads, nodes, keys, widths=(16, 16), dtype=torch.float32, mask_rows=None, batch=2):
    """As a pass has them: queries with the heads beside each other, keys and values amid a larger cache."""
    coin = torch.Generator().manual_seed(0)
    query = torch.randn(batch, nodes, heads, widths[0], generator=coin).transpose(1, 2)
    key, value = (torch.randn(batch, key_heads, keys + 9, width, generator=coin)[:, :, 4:-5] for width in widths)
    seen = torch.rand(batch, 1, mask_rows or nodes, keys, generator=coin) > 0.5
    seen[..., keys // 2] = True
    return [x.to(DEVICE, dtype) for x in (query, key, value)], seen.to(DEVICE)


def additive(seen, dtype):
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def error(states, mask, scale=0.3, **kwargs):
    """Of the split attention, beside torch's in float64 over copied keys."""
    query, key, value = (x.double() for x in states)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.double(), scale=scale)
    out = split_attention(*states, mask, scale)
    assert out.shape == expected.shape and out.dtype == states[0].dtype
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "nodes"), [(6, 6, 7), (6, 2, 1), (8, 1, 20), (4, 2, 64), (3, 3, 1)])
def test_it_is_attention_over_copied_keys(heads, key_heads, nodes, dtype):
    states, seen = inputs(heads, key_heads, nodes, 300, dtype=dtype)
    assert error(states, additive(seen, dtype)) < DTYPES[dtype]


@pytest.mark.parametrize("keys", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 1, 4500])
def test_any_number_of_keys(keys):
    states, seen = inputs(4, 2, 3, keys)
    assert error(states, additive(seen, torch.float32)) < 1e-5


@pytest.mark.parametrize("widths", [(8, 8), (20, 16), (24, 40), (192, 128)])
def test_any_width_of_heads(widths):
    states, seen = inputs(4, 2, 3, 200, widths)
    assert error(states, additive(seen, torch.float32)) < 1e-5


@pytest.mark.parametrize("first", [0, 700])
@pytest.mark.parametrize("last", [1000, 720])
def test_slots_that_no_row_sees_may_hold_anything(first, last):
    """Those before a window, and those of a cache that the text has not reached."""
    states, seen = inputs(4, 2, 3, 1000)
    seen[..., :first] = seen[..., last:] = False
    seen[..., first] = True
    outside = [*range(first // BLOCK * BLOCK), *range(-(-last // BLOCK) * BLOCK, 1000)]
    expected = split_attention(*states, additive(seen, torch.float32), 0.3)
    assert error(states, additive(seen, torch.float32)) < 1e-5
    for cached in states[1:]:
        cached[:, :, outside] = float("nan")
    assert torch.equal(split_attention(*states, additive(seen, torch.float32), 0.3), expected)


def test_one_row_of_a_mask_serves_all_and_rows_may_share_a_mask():
    states, seen = inputs(4, 2, 5, 200, mask_rows=1)
    assert error(states, additive(seen, torch.float32)) < 1e-5
    assert error(states, additive(seen[:1], torch.float32).expand(2, 1, 5, 200)) < 1e-5


def test_a_row_without_keys_gives_zeros_and_leaves_the_others_alone():
    states, seen = inputs(4, 2, 3, 200)
    expected = split_attention(*states, additive(seen, torch.float32), 0.3)
    seen[1, :, 2] = False
    out = split_attention(*states, additive(seen, torch.float32), 0.3)
    assert not out[1, :, 2].any()
    out[1, :, 2] = expected[1, :, 2]
    assert torch.equal(out, expected)


def test_large_scores_do_not_overflow():
    states, seen = inputs(4, 2, 3, 200, dtype=torch.float16)
    assert error(states, additive(seen, torch.float16), scale=100.0) < 2e-2


@pytest.fixture
def on_any_device(monkeypatch):
    """What chooses it does not ask for a GPU, nor for many keys."""
    monkeypatch.setattr(dispatch, "MIN_KEYS", {True: 0, False: 0})
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())


def test_attention_without_gradients_uses_it(on_any_device):
    states, seen = inputs(4, 2, 3, 200)
    mask = additive(seen, torch.float32)
    expected = split_attention(*states, mask, 16**-0.5)
    assert torch.equal(dispatch.grouped_attention(*states, mask), expected)
    states[0].requires_grad_()
    assert dispatch.grouped_attention(*states, mask).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_pass_over_a_tree_by_it(on_any_device, key_heads):
    base = tiny_llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=key_heads).to(DEVICE)
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tree = DraftTree(ids[:, :6], torch.tensor([[-1, 0, 0, 1, 1, 2]] * 2, device=DEVICE), 3)
    logits = []
    for served in (False, True):
        target = Target(base, scratch=8)
        target.prefill(ids, torch.tensor([11, 7], device=DEVICE), room=40)
        with mock.patch.object(kernels, "is_served", return_value=served), counted(kernels) as calls:
            logits.append(target.verify(tree).logits)
        assert calls.call_count == 2 * served
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_in_a_graph_it_is_one_operation(monkeypatch):
    monkeypatch.setattr(dispatch, "can_split", lambda *states: True)
    (query, key, value), seen = inputs(4, 2, 3, 200)
    mask, graphs = additive(seen, torch.float32), []

    def attend(query, key, value):
        return dispatch.grouped_attention(query, key[:, :, 8:], value[:, :, 8:], mask[..., 8:]).transpose(1, 2) + 1

    def backend(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return aot_eager(graph, example)

    out = torch.compile(attend, fullgraph=True, backend=backend)(query, key, value)
    assert torch.equal(out, attend(query, key, value))
    assert "specheads.split_attention.default" in graphs[0]
    opcheck(kernels.split_attention_in_graph, (query, key, value, mask, 0.25))


def counted(module):
    return mock.patch.object(module, "split_attention", side_effect=module.split_attention)


def test_what_it_serves(caplog):
    device = torch.device(DEVICE)
    kernels._is_right.cache_clear()
    assert all(kernels.is_served(device, dtype, 9, 24, 16) for dtype in DTYPES)
    assert not kernels.is_served(device, torch.float64, 9, 16, 16)
    assert not kernels.is_served(device, torch.float16, 9, 512, 16)
    assert not caplog.records


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_where_it_fails_torchs_own_is_used_after_one_line(on_any_device, monkeypatch, caplog, fault):
    def broken(query, key, value, mask, scale):
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler.\nPlease")
        return query * 1.1

    kernels._is_right.cache_clear()
    states, seen = inputs(4, 2, 3, 200)
    mask = additive(seen, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "split_attention", broken)
        outs = [dispatch.grouped_attention(*states, mask) for _ in range(2)]
    kernels._is_right.cache_clear()
    torch.testing.assert_close(outs[0], split_attention(*states, mask, 16**-0.5))
    (line,) = caplog.messages
    assert (
        "torch's own" in line and ("Failed to find C compiler." in line or "wrong by" in line) and "Please" not in line
    )
