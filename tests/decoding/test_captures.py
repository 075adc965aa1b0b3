"""Hidden states are read without leaving anything in the model: it can be pickled after any call, as before."""

import copy
import pickle
import threading

import pytest
import torch
from transformers import LogitsProcessor

import specheads
from specheads import DraftModel, NGram, convert
from specheads.decoding.verify.taps import FLAG, captures_of
from specheads.losses.teacher import tap_base
from specheads.training.features.extract import _last_tap
from tests.support.families import FAMILIES, RECURRENT, build

IDS = torch.tensor([[1, 5, 6, 7, 5, 6], [2, 9, 8, 9, 8, 9]])
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def base():
    return build(*FAMILIES["Llama"])


def hooks(model):
    """The hooks of each module, and whether transformers takes its own to be there."""
    return [
        (name, list(part._forward_hooks), list(part._forward_pre_hooks), vars(part).get(FLAG))
        for name, part in model.named_modules()
    ]


def decode_plain(base):
    specheads.generate(base, IDS, draft=False, **OPTIONS)


def decode_lookup(base):
    specheads.generate(base, IDS, draft="lookup", **OPTIONS)


def decode_ngram(base):
    specheads.generate(base, IDS, draft=NGram(2), **OPTIONS)


def decode_by_draft_model(base):
    small = build(*FAMILIES["Llama"])
    before = hooks(small)
    specheads.generate(base, IDS, draft=DraftModel(small), **OPTIONS)
    assert hooks(small) == before and pickle.dumps(small)


def decode_many(base):
    specheads.generate_many(base, IDS.tolist(), draft="lookup", batch_size=1, **OPTIONS)


def decode_patched(base):
    with specheads.patch(base):
        base.generate(IDS, draft="lookup", **OPTIONS)
        assert pickle.dumps(base)


def test_a_model_without_tapped_layers_gets_no_hooks(base):
    for decode in [decode_plain, decode_lookup, decode_ngram, decode_by_draft_model, decode_many, decode_patched]:
        before = hooks(base)
        decode(base)
        assert hooks(base) == before
        copied = pickle.loads(pickle.dumps(base))
        assert torch.equal(copied.generate(IDS, **OPTIONS), base.generate(IDS, **OPTIONS))


class Fails(LogitsProcessor):
    """Raises KeyboardInterrupt after so many calls."""

    depends_on_prefix_only = True

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > IDS.shape[1] + self.calls:
            raise KeyboardInterrupt
        return scores


def head_decodes(model):
    model.generate(IDS, **OPTIONS)


def head_decodes_compiled(model):
    model.generate(IDS, compile="eager", tree="chain:3", **OPTIONS)


def head_decodes_many(model):
    model.generate_many(IDS.tolist(), **OPTIONS)


def head_streams(model):
    stream = model.generate_many([*IDS.tolist()] * 2, batch_size=1, stream=True, **OPTIONS)
    next(stream)
    assert pickle.dumps(model), "while a stream is open"


def head_is_interrupted(model):
    with pytest.raises(KeyboardInterrupt) as held:  # as in a notebook, which keeps the frames of the last error
        model.generate(IDS, logits_processor=[Fails(5)], **OPTIONS)
    assert held.tb is not None and pickle.dumps(model)


def head_trains(model):
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.eval()
    model.zero_grad()


def features_are_saved(model):
    taps(model.base, model.head.layers)
    _last_tap(model.base, (1, model.base.config.num_hidden_layers))


@pytest.mark.parametrize("family", ["Llama", "Qwen3.5"])
@pytest.mark.parametrize(
    "use", [head_decodes, head_decodes_compiled, head_decodes_many, head_streams, head_is_interrupted, head_trains,
            features_are_saved],
)  # fmt: skip
def test_no_hook_of_tapped_layers_is_left(family, use):
    model = convert(build(*(FAMILIES | RECURRENT)[family]), "eagle3")
    before = hooks(model)
    use(model)
    assert hooks(model) == before
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))


def states(base):
    return base(IDS, output_hidden_states=True).hidden_states


def assert_same_states(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def taps(base, layers):
    """The tapped states, as training reads them."""
    return tap_base(base, IDS, torch.ones_like(IDS), torch.arange(6).expand(2, 6), layers)[0].chunk(len(layers), -1)


def test_hooks_that_the_caller_had_transformers_install_stay(base):
    """They are not ours to remove, and ours beside them would capture each state twice."""
    model = convert(base, "eagle3")
    model.generate(IDS, **OPTIONS)
    expected = states(base)
    before = hooks(base)
    model.generate(IDS, **OPTIONS)
    assert_same_states(taps(base, (1, 3)), (expected[1], expected[3]))
    assert hooks(base) == before
    assert_same_states(states(base), expected)


def test_a_replaced_layer_is_tapped_too(base):
    model = convert(base, "eagle3")
    model.generate(IDS, **OPTIONS)
    base.model.layers[1] = copy.deepcopy(base.model.layers[1])
    base.model.layers[1].mlp.down_proj.weight.data.mul_(2)
    assert_same_states(taps(base, (1, 2)), states(base)[1:3])
    assert torch.equal(model.generate(IDS, **OPTIONS), base.generate(IDS, **OPTIONS))


def test_another_thread_that_asks_for_hidden_states_gets_all_of_them():
    """Its pass meets hooks that a pass of ours removes at its end; so they stay."""
    base = build(*FAMILIES["Llama"])
    expected = states(copy.deepcopy(base))
    inside, done, found = threading.Event(), threading.Event(), []

    def ask():
        found.append(states(base))

    def pause(module, args, output):  # in the other thread's pass, after its first layer
        if threading.current_thread() is other:
            inside.set()
            assert done.wait(20)

    other = threading.Thread(target=ask)
    pausing = base.model.layers[0].register_forward_hook(pause)
    with captures_of(base).installed():
        states(base)
        other.start()
        assert inside.wait(20)
    done.set()
    other.join()
    pausing.remove()
    assert_same_states(found[0], expected)
    assert_same_states(states(base), expected)
    with captures_of(base).installed():
        assert_same_states(states(base), expected)


def test_a_forward_that_the_caller_compiled_has_its_hooks_before_it_is_traced(base):
    base.forward = torch.compile(base.forward, backend="eager")
    before = hooks(base)
    with captures_of(base).installed():
        assert all(layer._forward_hooks for layer in base.model.layers)
    assert hooks(base) == before
