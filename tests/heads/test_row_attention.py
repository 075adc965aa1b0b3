"""Attention of training rows, computed in parts, equals a whole softmax in outputs and gradients."""

import itertools

import pytest
import torch

from specheads.decoding.verify.masks import Reach
from specheads.heads.layers import row_attention as code
from specheads.heads.layers.row_attention import RowMask, row_attention

B, HEADS, KEY_HEADS, T, D = 2, 4, 2, 8, 4


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def slow(query, keys, values, mask, shared, own_mask):
    """One query at a time, over the list of keys it may see."""
    out = torch.zeros(*query.shape[:3], values[0].shape[-1], dtype=query.dtype)
    for b, h, n in itertools.product(range(B), range(HEADS), range(query.shape[2])):
        e, column = h // (HEADS // KEY_HEADS), n if mask.columns is None else int(mask.columns[b, n])
        position = int(mask.positions[b, column]) + int(torch.as_tensor(mask.ahead).expand(query.shape[2])[n])
        pairs = []
        for t in range(column + 1):
            near = mask.reach.kind == "full" or position - int(mask.positions[b, t]) < mask.reach.size
            listed = mask.keys is None or bool(mask.keys[b, t])
            if near and listed and mask.documents[b, t] == mask.documents[b, column]:
                pairs.append((keys[0][b, e, t], values[0][b, e, t]))
        s = 0
        for key, value in zip(keys[1:], values[1:], strict=True):
            for m in range(n // shared * shared, n // shared * shared + shared):
                if own_mask is None or bool(own_mask[b if len(own_mask) > 1 else 0, n, s]):
                    pairs.append((key[b, e, m], value[b, e, m]))
                s += 1
        weights = torch.stack([query[b, h, n] @ key * D**-0.5 for key, _ in pairs]).softmax(0)
        out[b, h, n] = sum(w * value for w, (_, value) in zip(weights, pairs, strict=True))
    return out


@pytest.mark.parametrize("reach", [Reach(), Reach("sliding", 3)])
def test_it_equals_one_query_at_a_time_in_outputs_and_gradients(reach, monkeypatch):
    monkeypatch.setitem(code.SCORES, "cpu", 1)
    monkeypatch.setattr(code, "FEWEST", 5)  # so several parts, of which the last is smaller
    torch.manual_seed(0)
    documents = torch.tensor([[1] * 5 + [2] * 3, [1] * 8])
    positions = torch.tensor([[*range(5), *range(3)], [*range(8)]])
    columns = torch.tensor([[6, 3, 0, 7, 4, 5], [5, 7, 2, 6, 1, 4]])
    some = torch.ones(B, T, dtype=torch.bool).index_fill(1, torch.tensor([0, 3]), False)
    lower = torch.ones(3, 3, dtype=torch.bool).tril().repeat(2, 1).unsqueeze(0)
    each = torch.rand(B, T, 2) < 0.5
    each[..., 0] |= ~each.any(2)
    for mask, shared, count, own_mask in (
        (RowMask(documents, positions, reach), 1, 0, None),
        (RowMask(documents, positions, reach, ahead=2), 1, 2, None),
        (RowMask(documents, positions, reach, columns, 2), 1, 2, None),
        (RowMask(documents, positions, reach, columns, torch.arange(6) % 3 + 1), 3, 1, lower),
        (RowMask(documents, positions, reach, ahead=1, keys=some), 1, 2, each),
    ):
        number = T if mask.columns is None else mask.columns.shape[1]
        query = random(B, HEADS, number, D)
        keys = [random(B, KEY_HEADS, n, D) for n in (T, *(number,) * count)]
        values = [random(B, KEY_HEADS, n, D - 2) for n in (T, *(number,) * count)]
        out = row_attention(query, keys, values, mask, shared=shared, own_mask=own_mask)
        expected = slow(query, keys, values, mask, shared, own_mask)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        upstream = torch.randn_like(out)
        found, true = (torch.autograd.grad(o, [query, *keys, *values], upstream) for o in (out, expected))
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_what_it_keeps_for_the_backward_pass_grows_as_the_row_does():
    def kept(length):
        sizes = []
        tensors = [torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(5)]
        mask = RowMask(torch.ones(1, length).long(), torch.arange(length).unsqueeze(0), Reach())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            row_attention(tensors[0], tensors[1:3], tensors[3:], mask)
        return sum(sizes)

    assert kept(512) == 2 * kept(256) > 0


def test_keys_that_no_query_of_a_part_attends_to_are_left_out():
    """A window and a document are short, however long the row."""
    length, parts = 64, [slice(start, start + 4) for start in range(0, 64, 4)]
    position = torch.arange(length).unsqueeze(0)
    for mask, most in (
        (RowMask(torch.ones(1, length).long(), position, Reach("sliding", 3)), 4 + 3 - 1),
        (RowMask(position // 16, position % 16, Reach()), 16),
        (RowMask(position // 16, position % 16, Reach(), keys=position < 0), 1),  # none at all
    ):
        assert max(keys.stop - keys.start for keys in mask.attended(parts)) == most, mask
