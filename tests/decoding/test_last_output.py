"""The last layer's output before the final norm, tap n + 1, is what goes into the base's final norm: in prompts, trees,
compiled steps, training and threads; and no hook of it is left on the base."""

import threading

import pytest
import torch

from specheads import Target, UnsupportedModel, chain, convert
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.step import verify
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify import taps
from specheads.decoding.verify.hf_base import decoder_of, layer_count, text_config
from specheads.heads.layers.block import final_norm
from specheads.losses.teacher import tap_base
from tests.support.compiled_texts import fresh_dynamo, texts_of  # noqa: F401
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import tiny_llama

ALL = FAMILIES | RECURRENT
IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60, 12]])
TREE = DraftTree(torch.tensor([[7, 3, 4, 9, 11]]), torch.tensor([[-1, 0, 0, 2, 3]]), 3)
CHAIN = DraftTree(torch.tensor([[7, 4, 9]]), torch.tensor([[-1, 0, 1]]), 2)
PATH = [0, 2, 3, 4]  # of the tree's nodes, to the deepest


@torch.no_grad()
def normed(base, ids):
    """What the final norm is given in a pass over ids (B, T), and the hidden_states; None for a base without a norm."""
    given, norm = [], final_norm(base)
    if norm is None:
        return None, None
    handle = norm.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    states = decoder_of(base)(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return given[-1], states


def drafts(out):
    """What was drafted in each step."""
    return [step.drafted for step in out.steps]


def hooks(base):
    return [hook for module in base.modules() for hook in module._forward_hooks.values() if hook is taps.keep_output]


@torch.no_grad()
@pytest.mark.sampled(11)
@pytest.mark.parametrize("family", ALL)
def test_it_goes_into_the_final_norm_of_every_family(family):
    base = build(*ALL[family])
    count = layer_count(text_config(base))
    last, layers = taps.last_output(text_config(base)), (1, count + 1, count)
    assert last == count + 1
    target = Target(base, layers, scratch=5)
    prompt = target.prefill(IDS, torch.tensor([8]), room=9).features
    tree = target.verify(TREE).features
    text = torch.cat([IDS, TREE.tokens[:, PATH]], 1)
    own, states = normed(base, text)
    if own is None:
        pytest.skip("its final norm has another name")
    wanted = torch.cat([states[1], own, states[count]], -1)
    near = 2e-2 if family in RECURRENT else 1e-5  # Mamba's passes over one token and over many round differently
    near *= max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(prompt, wanted[:, :8], rtol=1e-5, atol=near)
    torch.testing.assert_close(tree[:, PATH], wanted[:, 8:], rtol=1e-5, atol=near)
    mask, positions = torch.ones_like(text), torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(tap_base(base, text, mask, positions, layers)[0], wanted, rtol=1e-5, atol=near)
    assert not torch.allclose(own, states[count], rtol=0.1) or type(final_norm(base)).__name__ == "Identity"
    assert not hooks(base)


def test_a_head_drafts_from_it(base):
    model = convert(base, "eagle3", taps=(2, 5))
    torch.nn.init.normal_(model.head.fc.weight, std=0.3)
    seen = []
    fuse = model.head.fuse
    model.head.fuse = lambda features: seen.append(features) or fuse(features)
    out = model.generate(IDS, tree=chain(3), max_new_tokens=8, do_sample=False)
    own, states = normed(base, out)
    torch.testing.assert_close(seen[0][:, :8], torch.cat([states[2], own], -1)[:, :8], rtol=1e-5, atol=1e-5)
    assert torch.equal(out, base.generate(IDS, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", ["Llama", "Qwen3.5"])
def test_compiled_steps_read_it_and_are_compiled_once(name):
    base = build(*ALL[name])
    base.generation_config.eos_token_id = None
    last = layer_count(text_config(base)) + 1
    steps = compiled_steps(base, "eager")
    target = Target(base, (1, last), scratch=5, static=True)
    features = []
    for run in (verify, lambda target, tree: steps.run(verify, 0, target, tree)):
        target.prefill(IDS, torch.tensor([8]), room=9)
        target.prepare(9)
        with target.patched_forward():
            features.append(run(target, CHAIN).features)
    torch.testing.assert_close(*features, rtol=0, atol=0)
    assert steps.failure is None and len(steps) == 1
    model = convert(base, "eagle3", taps=(1, last))
    without, compiled = texts_of(model, padded(PROMPTS), tree=chain(2))
    assert compiled == without
    graphs = len(steps)
    assert graphs > 1 and texts_of(model, padded(PROMPTS), tree=chain(2))[1] == without
    assert len(steps) == graphs  # the hook of a call is no part of the graphs' keys
    assert steps.failure is None and not hooks(base) and taps._traced == []


def test_threads_read_their_own_passes_alone():
    base = tiny_llama()
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "tree": chain(3)}
    models = [convert(base, "eagle3", taps=(2, 9)), convert(base, "eagle3", taps=(2, 8)), convert(base, "medusa")]
    prompts = [torch.randint(3, 97, (1, 4 + i), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    calls = [(models[i % 3], prompt) for i, prompt in enumerate(prompts)]
    alone = [model.generate(prompt, **options) for model, prompt in calls]
    found = [None] * len(calls)

    def call(i):
        found[i] = calls[i][0].generate(calls[i][1], **options)

    for _ in range(3):
        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for own, other in zip(alone, found, strict=True):
            assert torch.equal(own.sequences, other.sequences)
            assert drafts(own) == drafts(other)
    assert not hooks(base)


def test_a_pass_that_fails_leaves_no_hook(base, monkeypatch):
    model = convert(base, "eagle3", taps=(2, 5))
    monkeypatch.setattr(base.lm_head, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(IDS, max_new_tokens=2)
    assert not hooks(base) and taps._waiting.outputs == []


def test_a_base_without_such_a_state_is_refused(base, monkeypatch):
    monkeypatch.setattr(taps, "decoder_layers", lambda base: None)
    with pytest.raises(UnsupportedModel, match="its last layer was not found, so its output before the final norm"):
        convert(base, "eagle3", taps=(2, 5)).generate(IDS, max_new_tokens=2)
