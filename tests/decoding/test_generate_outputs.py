"""What generate() gives back beside the text: scores, logits, steps, statistics; and what it copies to the host."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specheads import (
    CSLeniency,
    Ensemble,
    Exact,
    Fuzzy,
    Lenient,
    SampledTree,
    TopN,
    Typical,
    convert,
)
from specheads.decoding.results import AcceptanceCounts, Step
from tests.support.prompts import BATCHES, PAD, V
from tests.support.replay_drafter import Replay
from tests.support.tiny_models import tiny_llama


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [5, 6]}], ids=["raw", "processed"]
)
def test_scores_and_logits_are_hugging_faces(model, batch, options):
    inputs = BATCHES[batch]
    columns = inputs["input_ids"].shape[1]
    options = {
        **options, "do_sample": False, "max_new_tokens": 15, "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "eos_token_id": list(range(80, 90)), "pad_token_id": PAD,
    }  # fmt: skip
    theirs = model.base.generate(**inputs, **options)
    out = model.generate(**inputs, **options, draft=Replay(inputs, theirs.sequences))
    assert torch.equal(out.sequences, theirs.sequences)
    assert len(out.scores) == len(theirs.scores) == len(out.logits) == out.sequences.shape[1] - columns
    for row, ids in enumerate(out.sequences[:, columns:].tolist()):
        length = next((i + 1 for i, token in enumerate(ids) if 80 <= token < 90), len(ids))
        for own, other in ((out.scores, theirs.scores), (out.logits, theirs.logits)):
            for position in range(length):
                torch.testing.assert_close(own[position][row], other[position][row], atol=1e-3, rtol=1e-4)
    assert model.generate(**inputs, **{**options, "output_scores": False}).scores is None


def test_scores_and_logits_are_float32_for_a_bfloat16_model():
    half = convert(tiny_llama(num_hidden_layers=2).to(torch.bfloat16), "medusa")
    options = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    for out in (half.generate(**BATCHES["one"], **options), half.base.generate(**BATCHES["one"], **options)):
        assert out.scores[0].dtype == out.logits[0].dtype == torch.float32


def test_a_step_that_ends_with_a_draft_gains_no_token_of_the_base():
    """Two rows, of which the second ends with the first step."""
    rest = {"ranks": [[], []], "drafted": [2, 2], "seconds": 0.0}
    steps = [Step([[1, 2, 3], [4]], [2, 0], **rest), Step([[5, 6], []], [2, 0], **rest)]
    counts = AcceptanceCounts.of(steps)
    assert counts == AcceptanceCounts(3, 6, (2, 2)) and counts.tokens_per_step == 2 and counts.shares == [2 / 3] * 2
    more = counts + AcceptanceCounts(1, 4, (1, 1, 1))
    assert more == AcceptanceCounts(4, 10, (3, 3, 1)) and more - counts == AcceptanceCounts(1, 4, (1, 1, 1))
    assert AcceptanceCounts.of([]).tokens_per_step == 1


def test_statistics_add_up(model):
    for limit, do_sample in itertools.product([13, 14, 15, 16], [False, True]):
        inputs = BATCHES["ragged"]
        columns = inputs["input_ids"].shape[1]
        expected = model.base.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=96, pad_token_id=PAD)
        out = model.generate(
            **inputs, do_sample=do_sample, max_new_tokens=limit, eos_token_id=96, pad_token_id=PAD, seed=4,
            return_dict_in_generate=True, draft=Replay(inputs, expected), suppress_tokens=[PAD] if do_sample else None,
        )  # fmt: skip
        totals = out.statistics()
        lengths = [(row != PAD).sum().item() for row in out.sequences[:, columns:]]
        assert totals["tokens"] == sum(lengths)
        assert totals["steps"] == len(out.steps) - 1
        rows = [list(itertools.chain.from_iterable(step.tokens[b] for step in out.steps)) for b in range(3)]
        assert [len(row) for row in rows] == lengths
        taken = sum(bool(row) for step in out.steps[1:] for row in step.tokens)
        assert totals["drafted"] == sum(map(sum, (step.drafted for step in out.steps)))
        assert totals["accepted"] == sum(map(sum, (step.accepted for step in out.steps)))
        assert totals["accepted_length"] == pytest.approx((sum(lengths) - 3) / taken)
        assert sum(totals["accepted_by_depth"]) == pytest.approx(totals["accepted"] / taken)
        assert totals["accepted_by_depth"] == sorted(totals["accepted_by_depth"], reverse=True)
        assert totals["lossless"] is True
        left = [limit - 1] * 3
        for step in out.steps[1:]:
            room = max(n for n, row in zip(left, step.tokens, strict=True) if row)
            assert step.drafted == [6 if row and room > 1 else 0 for row in step.tokens]  # for the last token none
            left = [n - len(row) for n, row in zip(left, step.tokens, strict=True)]
            for tokens, accepted, ranks in zip(step.tokens, step.accepted, step.ranks, strict=True):
                assert len(ranks) == accepted <= len(tokens) <= accepted + 1
                # A sample may by chance be what was drafted first.
                assert do_sample or all(rank == 1 for rank in ranks), "the right token is always drafted second"
        if not do_sample:
            assert 0 < totals["accepted"] < totals["tokens"]


RULES = [  # all but Traversal, which reads the shape of a tree that is new
    Exact(), Lenient(0.5), Typical(), TopN(), CSLeniency(2), Ensemble(0.7), Fuzzy(0.3),
    Fuzzy(0.3, "top_p_js", mode="rescue"), Fuzzy(0.3, "top_k_kl", processed=True), Fuzzy(0.5, "random"),
]  # fmt: skip


class Reads(TorchDispatchMode):
    """How many values Python reads at a time from tensors, by how it reads them: on a GPU each is a copy to the host.

    The methods are seen where they are called, so that on the CPU too, where nothing is copied, none is missed (but of
    `to` only what names the CPU: here a tensor's own device is the CPU too); what reads a number without one of them,
    or needs to know a size from the values, is seen where torch looks it up.
    """

    METHODS = ("tolist", "cpu", "numpy", "item", "to", "__bool__", "__int__", "__float__", "__index__", "__array__")

    def __init__(self, patch):
        super().__init__()
        self.sizes = {name: [] for name in (*self.METHODS, "lookup")}
        for name in self.METHODS:
            patch.setattr(torch.Tensor, name, self.noting(name, getattr(torch.Tensor, name)))

    def noting(self, name, original):
        def method(tensor, *args, **kwargs):
            if name != "to" or "cpu" in (*args, *kwargs.values()):
                self.sizes[name].append(tensor.numel())
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self.sizes["lookup"].append(args[0].numel())
        elif func is torch.ops.aten.index.Tensor:
            self.sizes["lookup"] += [i.numel() for i in args[1] if i is not None and i.dtype == torch.bool]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(), lambda t: t.cpu(), lambda t: t.numpy(), lambda t: t.to("cpu"), lambda t: t.nonzero(),
        lambda t: t.to(device="cpu", dtype=torch.float64), lambda t: t[t > 0], np.asarray,
    ],
)  # fmt: skip
def test_every_way_of_copying_to_the_host_is_seen(read, monkeypatch):
    with monkeypatch.context() as patch, Reads(patch) as reads:
        read(torch.ones(5))
    assert 5 in itertools.chain.from_iterable(reads.sizes.values())


@pytest.mark.parametrize("read", [lambda t: t.item(), bool, int, float, lambda t: [1, 2][t.long()]])
def test_every_way_of_reading_one_number_is_seen(read, monkeypatch):
    with monkeypatch.context() as patch, Reads(patch) as reads:
        read(torch.ones(()))
    assert 1 in itertools.chain.from_iterable(reads.sizes.values())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("tree", [None, SampledTree((3, 2, 1))], ids=["default", "sampled"])
@pytest.mark.parametrize("accept", RULES, ids=repr)
def test_no_vocabulary_wide_tensor_goes_to_the_host(model, monkeypatch, do_sample, tree, accept):
    """Of what is copied, nothing is as large as one row's probabilities; each step copies once."""
    with monkeypatch.context() as patch, Reads(patch) as reads:
        out = model.generate(
            **BATCHES["ragged"], do_sample=do_sample, max_new_tokens=30, seed=0, tree=tree, accept=accept,
            return_dict_in_generate=True,
        )  # fmt: skip
    sizes = {name: [size for size in found if size > 1] for name, found in reads.sizes.items()}
    del sizes["to"], sizes["lookup"]
    assert max(itertools.chain.from_iterable(reads.sizes.values())) < V
    assert len(out.steps) <= sum(map(len, sizes.values())) <= len(out.steps) + 16


@pytest.mark.parametrize("head", ["medusa", "hydra", "eagle", "eagle3", "parallel", None])
@pytest.mark.parametrize("batch", BATCHES)
def test_each_step_is_one_pass_of_the_base_over_the_nodes_of_its_tree(base, head, batch):
    """No prefix is computed again, and nothing else runs the base's layers."""
    model = convert(base, head or "medusa")
    passes = {"forward": [], "layer": []}

    def columns_of_ids(module, args, kwargs):
        passes["forward"].append(kwargs["input_ids"].shape[1])

    def columns_of_hidden(module, args, kwargs):
        passes["layer"].append(args[0].shape[1])

    spies = [
        base.register_forward_pre_hook(columns_of_ids, with_kwargs=True),
        base.model.layers[0].register_forward_pre_hook(columns_of_hidden, with_kwargs=True),
    ]
    try:
        out = model.generate(
            **BATCHES[batch], do_sample=False, max_new_tokens=12, draft=head is not None, return_dict_in_generate=True
        )
    finally:
        for spy in spies:
            spy.remove()
    nodes = [1 + max(step.drafted) for step in out.steps[1:]]
    assert len(nodes) >= 3 and (min(nodes[:-1]) > 1) == (head is not None)  # the last step may need no draft
    assert passes["forward"] == passes["layer"] == [BATCHES[batch]["input_ids"].shape[1], *nodes]
