"""Compiled steps as CUDA graphs. Without a device a captured graph is replayed by calling the function once more over
the same memory; `benchmarks/gpu.py` compares the texts of real ones."""

import logging

import pytest
import torch
from torch import nn

from specheads import DraftModel, chain, comb
from specheads.decoding.compiled import cuda_graphs, graphs
from specheads.decoding.compiled.cuda_graphs import MAX_CAPTURES, CudaGraph
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import fresh_dynamo, texts_of  # noqa: F401
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, tiny_llama


@pytest.fixture
def captured(monkeypatch):
    """How often a graph was captured, and replayed."""
    count = {"captured": 0, "replayed": 0}

    def capture_graph(function, inputs, pool):
        count["captured"] += 1
        before = [value.clone() if isinstance(value, torch.Tensor) else None for value in inputs]
        held = function(*inputs)

        def run():
            count["replayed"] += 1
            for old, new in zip(held, function(*inputs), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        for value in held:  # a capture runs nothing
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(torch.nan)
        for value, old in zip(inputs, before, strict=True):
            if old is not None and value.numel() == value.untyped_storage().nbytes() // value.element_size():
                value.copy_(old)
        return run, held

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(cuda_graphs, "NOT_CAPTURED", ())
    return count


def marked(tensor):
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def test_a_replay_gives_what_the_function_gives_and_writes_where_it_writes(captured):
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def function(weight, cache, row, spread, nothing):
        cache[:] += row
        return [row @ weight + spread.sum(), cache.clone(), row.t() if row.dim() > 1 else row, nothing]

    graph, results = CudaGraph(function, None), []
    cache, other = marked(torch.zeros(3, 4)), torch.zeros(3, 4)
    for _ in range(6):
        row = torch.randn(8, 4)[::2][:3]  # strides beyond its own elements
        spread = torch.randn(1).expand(5)  # one element five times
        results.append((graph(weight, cache, row, spread, None), function(weight, other, row, spread, None)))
        assert torch.equal(cache, other)
    for given, expected in results:  # also what earlier calls gave
        for one, two in zip(given, expected, strict=True):
            assert one is two is None or torch.equal(one, two)
    assert captured == {"captured": 1, "replayed": 5}


def test_a_cache_at_another_address_is_captured_anew_and_the_last_captures_are_kept(captured):
    def function(cache, row):
        cache += row
        return [cache.sum()]

    graph, caches = CudaGraph(function, None), [marked(torch.zeros(3)) for _ in range(MAX_CAPTURES + 1)]
    totals = [0.0] * len(caches)
    graph(marked(torch.zeros(3)), torch.ones(3))
    order = [*range(MAX_CAPTURES), 0, MAX_CAPTURES, 0, 1]  # 1 was used longest ago when the last place came
    for step, which in enumerate(order):
        totals[which] += 3 * step
        assert graph(caches[which], torch.full((3,), float(step)))[0] == totals[which]
    assert captured["captured"] == MAX_CAPTURES + 2
    assert len(graph.captures) == MAX_CAPTURES


def test_what_cuda_cannot_capture_runs_without_a_graph_after_one_warning(monkeypatch, caplog):
    def refused(function, inputs, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "capture_graph", refused)
    monkeypatch.setattr(cuda_graphs, "NOT_CAPTURED", ())
    monkeypatch.setattr(logging.getLogger("specheads"), "propagate", True)
    graph = CudaGraph(lambda value: [value + 1], None)
    assert [int(graph(torch.tensor(n))[0]) for n in range(4)] == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "a compiled step runs without a CUDA graph: operation not permitted when stream is capturing"
    ]


def test_a_function_of_a_tensor_on_the_host_is_not_captured(captured, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "NOT_CAPTURED", ("cpu",))
    graph = CudaGraph(lambda value: [value + 1], None)
    assert [int(graph(torch.tensor(n))[0]) for n in range(3)] == [1, 2, 3]
    assert captured["captured"] == 0


@pytest.fixture
def as_cuda_graphs(captured, monkeypatch):
    """Compiled steps as on CUDA, by the backend "eager"."""
    real = torch.compile

    def compiled(function, **options):
        options["backend"] = lambda graph, inputs: CudaGraph(graph.forward, None)
        return real(function, **options)

    monkeypatch.setattr(graphs.torch, "compile", compiled)
    return captured


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_texts_by_replayed_steps_are_the_texts_without_compiling(as_cuda_graphs, kind, sampling):
    model = spec_model(kind)
    for tree, seed in ((comb(3, 2), 1), (chain(3), 2), (comb(3, 2), 3)):
        options = {"tree": tree, "max_new_tokens": 24, **sampling, **({"seed": seed} if sampling else {})}
        without, compiled = texts_of(model, padded(PROMPTS), **options)
        assert compiled == without
    assert as_cuda_graphs["replayed"] > 10


@pytest.mark.parametrize("draft", ["model", "lookup", False])
def test_texts_by_replayed_steps_of_other_drafters(as_cuda_graphs, draft):
    base = tiny_llama(num_hidden_layers=2)
    options = {"draft": DraftModel(near(base)) if draft == "model" else draft, "max_new_tokens": 24}
    if draft == "model":
        options["tree"] = chain(3)
    for _ in range(2):
        without, compiled = texts_of(base, padded(PROMPTS), **options)
        assert compiled == without
    assert as_cuda_graphs["replayed"] > 10
