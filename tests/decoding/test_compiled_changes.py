"""A graph serves no model that has changed since in what the graph holds: the text is that of uncompiled steps.

The oracle is torch's own guards, which are otherwise left out: if they would compile anew what we have a graph for, the
call fails. The backend "eager" traces as torch's own does, and runs the operations as they are.
"""

import copy
import functools
import gc
import types

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from torch import nn

from specheads.decoding.compiled import compiled_steps
from specheads.decoding.compiled.keys import module_state, torch_settings
from tests.support.compiled_texts import fresh_dynamo, texts_of  # noqa: F401
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import tiny_llama


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def layer_norm_for(norm):
    other = nn.LayerNorm(len(norm.weight), bias=False).eval()
    other.weight = norm.weight
    return other


def negative_for(linear):
    other = Negative(linear.in_features, linear.out_features, bias=False).eval()
    other.weight = linear.weight
    return other


def put(owner, name, value):
    """A change: the attribute is set. owner: from the base."""
    return lambda base: setattr(owner(base), name, value(getattr(owner(base), name, None)))


def mlp(base):
    return base.model.layers[0].mlp


def attention(base):
    return base.model.layers[0].self_attn


def patched_in_the_class(base):
    plain = llama.LlamaMLP.forward
    llama.LlamaMLP.forward = lambda self, x: -plain(self, x)
    return lambda: setattr(llama.LlamaMLP, "forward", plain)


def patched_in_its_module(base):
    plain = llama.apply_rotary_pos_emb
    llama.apply_rotary_pos_emb = lambda query, key, *angles, **options: (query, key)
    return lambda: setattr(llama, "apply_rotary_pos_emb", plain)


def hook_of_all_modules(base):
    def hook(module, inputs, out):
        return -out if isinstance(module, llama.LlamaMLP) else None

    return nn.modules.module.register_module_forward_hook(hook).remove


def as_kernels_of_mathematics(base):
    torch.backends.cuda.enable_flash_sdp(False)
    return lambda: torch.backends.cuda.enable_flash_sdp(True)


CHANGES = {
    "activation": put(mlp, "act_fn", lambda old: nn.ReLU().eval()),
    "norm": put(lambda base: base.model.layers[0], "input_layernorm", layer_norm_for),
    "output matrix": put(lambda base: base, "lm_head", negative_for),
    "class": put(lambda base: base.lm_head, "__class__", lambda old: Negative),
    "forward": put(mlp, "forward", lambda old: lambda x: -old(x)),
    "bound forward": put(mlp, "forward", lambda old: types.MethodType(lambda self, x: -x, old.__self__)),
    "partial forward": put(mlp, "forward", lambda old: functools.partial(lambda k, x: k * old(x), -2.0)),
    "epsilon": put(lambda base: base.model.norm, "variance_epsilon", lambda old: 0.7),
    "scale": put(attention, "scaling", lambda old: 9 * old),
    "negative zero": put(mlp, "extra", lambda old: -0.0),
    "shared part": lambda base: setattr(base.model.layers[1], "mlp", mlp(base)),
    "tied weights": lambda base: setattr(mlp(base).up_proj, "weight", mlp(base).gate_proj.weight),
    "strides": put(lambda base: base.lm_head, "weight",
                   lambda old: nn.Parameter(old.detach().t().contiguous().t(), requires_grad=False)),
    "layers": lambda base: setattr(base.model, "layers", nn.ModuleList([*base.model.layers, base.model.layers[0]])),
    "config": put(lambda base: base.config, "rms_norm_eps", lambda old: 0.5),
    "attention": lambda base: base.set_attn_implementation("eager"),
    "training": lambda base: base.train().eval,
    "hook": lambda base: mlp(base).register_forward_hook(lambda module, inputs, out: -out).remove,
    "hook of all": hook_of_all_modules,
    "forward of the class": patched_in_the_class,
    "function of its module": patched_in_its_module,
    "kernels of attention": as_kernels_of_mathematics,
}  # fmt: skip


def small():
    return tiny_llama(num_hidden_layers=2).eval().requires_grad_(False)


@pytest.fixture
def guarded(monkeypatch):
    """torch's guards are kept, and compiling anew is an error. Those of settings of torch are not asked."""
    monkeypatch.setattr(
        torch.compiler, "skip_all_guards_unsafe", lambda guards: [one.guard_type != "GLOBAL_STATE" for one in guards]
    )
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_holds_is_part_of_its_key(name):
    base = small()
    before = module_state(base), torch_settings()
    assert (module_state(base), torch_settings()) == before
    undo = CHANGES[name](base)
    try:
        assert (module_state(base), torch_settings()) != before
    finally:
        (undo or int)()


def test_a_class_that_changes_places_is_part_of_the_key():
    """The same classes, in the same order of their first use, and the same attributes."""

    def model(*kinds):
        return nn.Sequential(*(kind() for kind in kinds))

    one, other = model(nn.Tanh, nn.Sigmoid, nn.Tanh), model(nn.Tanh, nn.Sigmoid, nn.Sigmoid)
    before = module_state(one)
    one[2] = other[2]
    assert module_state(one) != before


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "training"])
def test_the_text_after_a_change_is_that_of_uncompiled_steps(name, guarded):
    with torch.inference_mode(False):
        base = small()
    prompts = padded(PROMPTS[:1])
    without, compiled = texts_of(base, prompts, max_new_tokens=4)
    assert compiled == without
    with torch.inference_mode(False):
        undo = CHANGES[name](base)
    try:
        for _ in range(2):
            without, compiled = texts_of(base, prompts, max_new_tokens=6)
            assert compiled == without
    finally:
        (undo or int)()
    assert not compiled_steps(base, "eager").failures


def test_a_forward_at_the_address_of_a_freed_one_has_a_graph_of_its_own():
    base, prompts = tiny_llama(num_hidden_layers=1), padded(PROMPTS[:1])
    part, plain = mlp(base), mlp(base).forward
    for scale in (0.0, 1.0, 2.0, 0.0):
        part.forward = lambda x, scale=scale: scale * plain(x)
        without, compiled = texts_of(base, prompts, max_new_tokens=6)
        assert compiled == without
        del part.forward
        gc.collect()
    assert len(compiled_steps(base, "eager")) == 3, "a function of the same code and constants is no change"


def test_what_no_pass_reads_is_no_change():
    base = small()
    before = module_state(base)
    with torch.no_grad():
        base.lm_head.weight.mul_(2)
    base.generation_config = copy.deepcopy(base.generation_config)
    base.generation_config.eos_token_id, base.name_or_path = None, "elsewhere"
    with mlp(base).register_forward_hook(lambda *given: None):
        assert module_state(base) != before
    assert module_state(base) == before
