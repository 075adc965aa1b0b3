"""Passes over few tokens on a CPU use our kernels: in which blocks and layers, and what follows from it."""

import copy
import pickle
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import specheads
from specheads.decoding.compiled.keys import module_state, torch_settings
from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.drafters.base import with_defaults
from specheads.decoding.kernels import few_rows
from specheads.decoding.kernels.few_rows import MAX_ROWS, few_row_kernels, few_row_layers
from tests.support.compiled_texts import fresh_dynamo, needs_compiler  # noqa: F401

pytestmark = needs_compiler

IDS = torch.randint(97, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Tiny models are large enough."""
    monkeypatch.setattr(few_rows, "MIN_BYTES", 0)


@pytest.fixture
def calls(monkeypatch):
    """How often each operation of ours runs."""
    counts = {"few_rows": 0, "attention_of_few_rows": 0}
    assert few_rows.available()
    ours = torch.ops.specheads

    class Counted:
        def __getattr__(self, name):
            def run(*inputs):
                counts[name] += 1
                return getattr(ours, name).default(*inputs)

            return type("Operation", (), {"default": staticmethod(run)})

    monkeypatch.setattr(few_rows, "OURS", Counted())
    return counts


def tiny(seed=0, kv=2, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 37), nn.Linear(37, 11, bias=False)).to(dtype)


def block(*modules):
    return few_row_kernels(few_row_layers(modules))


def is_routed(module):
    return any("forward" in vars(part) for part in module.modules())


@torch.no_grad()
def test_linear_layers_are_ours_in_the_block_for_few_rows_alone(calls):
    for dtype, most in MAX_ROWS.items():
        model = layers(dtype)
        rows = torch.randn(most + 1, 70).to(dtype)
        expected = model(rows)
        calls["few_rows"] = 0
        with block(model), block(model):  # as a head's pass inside a base's
            assert torch.equal(model(rows), expected) and not calls["few_rows"]
            found = model(rows[:most].view(1, most, 70))
            assert calls["few_rows"] == 2 and found.shape == (1, most, 11)
            assert model(rows[0]).shape == (11,)
        torch.testing.assert_close(found[0], expected[:most], rtol=2**-6, atol=1e-2)
        assert not is_routed(model) and torch.equal(model(rows[:1]), F.linear(model[0](rows[:1]), model[1].weight))


def test_gradients_autocast_other_threads_and_other_layers_are_torchs(calls):
    model = layers()
    rows = torch.randn(2, 70)
    with block(model):
        model(rows).sum().backward()
    with torch.no_grad(), few_row_kernels([]):
        model(rows)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), block(model):
        assert model(rows).dtype == torch.bfloat16
    with torch.no_grad(), block(model):
        other = Thread(target=model, args=(rows,))
        other.start()
        other.join()
    assert not calls["few_rows"]

    class Special(nn.Linear):
        def forward(self, rows):
            return rows

    replaced = nn.Linear(70, 70)
    replaced.forward = lambda rows: rows + 1  # as accelerate's of an offloaded layer
    left = [Special(70, 70), replaced, nn.Linear(70, 70).half(), nn.Linear(70, 70, device="meta"), nn.Conv1d(70, 70, 1)]
    with torch.no_grad(), block(*left):
        assert torch.equal(left[0](rows), rows) and torch.equal(left[1](rows), rows + 1)
        left[2](rows.half())
    assert not calls["few_rows"] and "forward" in vars(replaced)


@torch.no_grad()
def test_a_model_in_a_block_has_the_state_of_one_outside_and_an_error_ends_the_block():
    model = tiny()
    before = module_state(model)
    outside = torch_settings()
    with pytest.raises(ValueError, match="stop"), block(model):  # noqa: PT012
        assert is_routed(model) and module_state(model) == before and torch_settings() != outside
        raise ValueError("stop")
    assert not is_routed(model) and module_state(model) == before


@torch.no_grad()
@pytest.mark.parametrize("dtype", MAX_ROWS)
@pytest.mark.parametrize(("excess", "expected"), [(0, 2), (1, 0)])
def test_a_graph_traced_in_a_block_has_our_products(dtype, excess, expected):
    model, graphs = layers(dtype), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    rows = torch.randn(MAX_ROWS[dtype] + excess, 70).to(dtype)
    with block(model):
        compiled = torch.compile(lambda rows: model(rows), backend=backend, fullgraph=True, dynamic=False)
        assert torch.equal(compiled(rows), model(rows))
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(torch.ops.specheads.few_rows.default) == expected


DRAFTS = [("lookup", "chain:5"), ("model", "chain:4"), ("model", "dynamic:8"), ("model", "static:8")]


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("dtype", MAX_ROWS)
def test_a_text_has_the_same_logits_bit_for_bit_with_and_without_drafts(kv, dtype, calls):
    """Chains and trees, heads that share keys and others, one row and several."""
    model, drafter = tiny(kv=kv, dtype=dtype), specheads.DraftModel(tiny(kv=kv, dtype=dtype))
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 40}
    plain = specheads.generate(model, IDS, **options)
    assert calls["few_rows"] and calls["attention_of_few_rows"] and not is_routed(model)
    for draft, tree in DRAFTS:
        drafted = specheads.generate(model, IDS, draft=drafter if draft == "model" else draft, tree=tree, **options)
        assert torch.equal(drafted.sequences, plain.sequences)
        assert all(map(torch.equal, drafted.logits, plain.logits))
    if kv == 2:  # the same weights as the drafter's: it is always right
        assert len(drafted.steps) < 20
    batch = torch.cat([IDS.flip(1), IDS])
    alone, rows = (specheads.generate(model, batch, draft=name, **options) for name in (None, drafter))
    assert torch.equal(rows.sequences, alone.sequences) and len(rows.steps) < len(alone.steps)
    assert all(map(torch.equal, rows.logits, alone.logits))


def test_torchs_own_kernels_are_one_argument_away_and_what_small_models_use(calls, monkeypatch):
    model = tiny()
    specheads.generate(model, IDS, max_new_tokens=3, do_sample=False, kernels=False)
    list(specheads.generate_many(model, IDS.tolist(), max_new_tokens=3, do_sample=False, kernels=False))
    monkeypatch.setattr(few_rows, "MIN_BYTES", 2**30)
    specheads.generate(model, IDS, max_new_tokens=3, do_sample=False)
    assert not calls["few_rows"] and not calls["attention_of_few_rows"]


def test_heads_passes_are_ours_too(calls):
    head, small = specheads.convert(tiny(), specheads.Eagle3Config(draft_vocab_size=97)).head, tiny()
    for drafter in (
        head,
        with_defaults(head),
        AutoDrafter(head),
        specheads.Cascade([head, specheads.MaxGram()], [[3, 2], [0, 2]]),
    ):
        assert drafter.draft_modules == (head,)
    assert specheads.DraftModel(small).draft_modules == (small,) and specheads.PromptLookup(3).draft_modules == ()
    model = specheads.convert(tiny(), specheads.Eagle3Config(draft_vocab_size=97))
    text = {}
    for kernels in (True, False):
        calls["few_rows"] = 0
        out = model.generate(IDS, draft=True, tree="chain:3", max_new_tokens=4, do_sample=False, kernels=kernels)
        text[kernels] = calls["few_rows"]
    per_pass = sum(isinstance(part, nn.Linear) for part in model.base.modules())
    assert not text[False] and text[True] > 3 * per_pass and out.shape == (1, 13)


def test_transformers_own_loop_is_faster_after_patch_without_drafts(calls):
    model = tiny(dtype=torch.float32)
    own = model.generate(IDS, max_new_tokens=8, do_sample=False)
    with specheads.patch(model):
        model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert not calls["few_rows"]
    with specheads.patch(model, draft=False):
        text = model.generate(IDS, max_new_tokens=8, do_sample=False)
        assert calls["few_rows"] and torch.equal(text, own)
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(duplicate.generate(IDS, max_new_tokens=8, do_sample=False), own)
        drafted = model.generate(IDS, draft="lookup", max_new_tokens=8, do_sample=False)
        assert torch.equal(drafted, own)
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match=r"patch\(draft='lookup'\).*calls say what drafts"):
        specheads.patch(model, draft="lookup")


def test_without_a_compiler_or_with_wrong_products_the_text_is_torchs_after_one_line(monkeypatch, hf_log):
    model = tiny(dtype=torch.float32)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = specheads.generate(model, IDS, **options, kernels=False)

    def broken():
        raise OSError("no C++ compiler\nand more")

    def wrong(rows, weight, bias=None):
        return F.linear(rows, weight, bias) + 1

    few_rows.load()
    for name, replacement, message in (
        ("load", broken, "no C++ compiler"),
        ("OURS", type("Wrong", (), {"few_rows": staticmethod(wrong)}), "wrong by"),
    ):
        few_rows.available.cache_clear()
        hf_log.clear()
        with monkeypatch.context() as patched:
            patched.setattr(few_rows, name, replacement)
            for _ in range(2):
                assert torch.equal(specheads.generate(model, IDS, **options), expected)
            assert sum(message in record.message for record in hf_log.records) == 1
    few_rows.available.cache_clear()
