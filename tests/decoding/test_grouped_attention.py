"""Query heads that share keys attend as rows of one product: the same numbers as with copied keys, and no copies."""

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.live_memory import LiveMemory
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify import causal, grouped_attention
from specheads.decoding.verify.causal import Target
from tests.support.families import FAMILIES, VOCAB, build
from tests.support.tiny_models import tiny_llama

LENGTHS = (5, 17, 11)
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]


def test_it_is_attention_over_copied_keys():
    for rows, (heads, key_heads) in itertools.product([1, 7], [(6, 6), (6, 2), (6, 1)]):
        coin = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(2, count, length, width, generator=coin, dtype=torch.float64)
            for count, length, width in ((heads, 7, 8), (key_heads, 50, 8), (key_heads, 50, 12))
        )
        seen = torch.rand(2, 1, rows, 50, generator=coin) > 0.5
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
        copies = [states.repeat_interleave(heads // key_heads, 1) for states in (key, value)]
        for scale in (None, 0.3):
            expected = F.scaled_dot_product_attention(query, *copies, attn_mask=mask, scale=scale)
            out = grouped_attention.grouped_attention(query, key, value, mask, scale)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_it_takes_what_cudas_kernels_give_in_memory(monkeypatch):
    """They write the heads of a row beside each other."""
    real, given = F.scaled_dot_product_attention, [torch.randn(2, n, m, 8) for n, m in ((6, 7), (2, 50), (2, 50))]
    mask = torch.zeros(2, 1, 7, 50)
    expected = grouped_attention.grouped_attention(*given, mask)

    def rows_first(*args, **kwargs):
        return real(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", rows_first)
    assert torch.equal(grouped_attention.grouped_attention(*given, mask), expected)


def verify(base, scratch=10):
    """Logits of a tree after prompts of different lengths."""
    coin = torch.Generator().manual_seed(0)
    target = Target(base, scratch=scratch)
    prompts = torch.randint(3, VOCAB, (3, max(LENGTHS)), generator=coin)
    target.prefill(prompts, torch.tensor(LENGTHS), room=40)
    tokens = torch.randint(3, VOCAB, (3, len(PARENTS)), generator=coin)
    return target.verify(DraftTree(tokens, torch.tensor([PARENTS] * 3), 4)).logits


@torch.no_grad()
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_verifies_as_with_copied_keys(name):
    base = build(*FAMILIES[name])
    layers = base.config.num_hidden_layers
    exact = not any("expert" in module for module, _ in base.named_modules())  # grouped products lack float64
    if exact:
        base = base.double()
    with mock.patch.object(causal, "grouped_heads", return_value=nullcontext()):
        expected = verify(base)
    real = grouped_attention.grouped_attention
    with mock.patch.object(grouped_attention, "grouped_attention", side_effect=real) as calls:
        out = verify(base)
    torch.testing.assert_close(out, expected, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    shares = getattr(base.config, "num_key_value_heads", None) not in (None, base.config.num_attention_heads)
    served = shares and base.config._attn_implementation == "sdpa"  # those left out here have no sdpa of their own
    assert calls.call_count == layers * served


def long_target(base, length):
    target = Target(base, scratch=16)
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    target.prefill(ids, torch.tensor([length]), room=20)
    chain = torch.arange(-1, 15).unsqueeze(0)
    return target, DraftTree(torch.full((1, 16), 7), chain, 15)


@torch.no_grad()
def test_a_pass_over_a_long_prefix_copies_no_keys():
    base = tiny_llama(num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096)
    target, tree = long_target(base, 2048)
    one_layer = 2 * 2 * 2048 * 32 * 4
    peaks = {}
    for name, switch in (("grouped", causal.grouped_heads(base)), ("copied", nullcontext())):
        with mock.patch.object(causal, "grouped_heads", return_value=switch), LiveMemory() as memory:
            target.verify(tree)
        peaks[name] = memory.peak
    assert peaks["grouped"] < one_layer < 4 * one_layer <= peaks["copied"]


@torch.no_grad()
def test_a_compiled_pass_copies_no_keys():
    target, tree = long_target(tiny_llama(num_attention_heads=4, num_key_value_heads=2), 40)
    heads = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                heads.append(node.args[1].meta["example_value"].shape[1])
        return graph

    expected = target.verify(tree).logits
    with grouped_attention.grouped_heads(target.base):
        out = torch.compile(lambda tree: target.verify(tree), fullgraph=True, backend=backend)(tree).logits
    assert heads == [2] * target.base.config.num_hidden_layers
    assert torch.equal(out, expected)


def test_a_base_keeps_the_attention_it_was_given():
    for attention in ["sdpa", "eager"]:
        base = build(*FAMILIES["Llama"], attn_implementation=attention)
        ids, mask = torch.arange(3, 9).view(2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])
        outside = base(ids, attention_mask=mask).logits
        with grouped_attention.grouped_heads(base):  # a caller of another thread, say, who brings no mask of ours
            torch.testing.assert_close(base(ids, attention_mask=mask).logits, outside)
            assert (base.config._attn_implementation == "eager") == (attention == "eager")
        assert base.config._attn_implementation == attention
        with pytest.raises(AttributeError), grouped_attention.grouped_heads(base):
            base(ids, attention_mask="none")
        assert base.config._attn_implementation == attention
