"""Which modules of a Hugging Face base carry a state from token to token, and how their code continues from one.

They are found by a trial pass, not by name: they write the cache's convolution and recurrent states.
"""

from __future__ import annotations

from collections.abc import Hashable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specheads.decoding.verify.model_inputs import cache_argument, embedding_count, input_device
from specheads.decoding.verify.recurrent import Inputs, RecurrentLayer, RecurrentModule, StateCell

TOKENS, FIRST = 6, 3  # of the trial pass, and how many of them come before a state is continued
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4}  # tolerance, relative to the largest output; 0.02 in half precision


class UnsupportedState(ValueError):
    """A state that cannot be continued from a copy; the message says why."""


probe_lock = RLock()  # one thread at a time probes a base
# By dtype and device, whose rounding decides whether two ways to run a layer count as equal.
_found: WeakKeyDictionary[PreTrainedModel, dict[Hashable, list[RecurrentModule]]] = WeakKeyDictionary()


def recurrent_modules(base: PreTrainedModel) -> list[RecurrentModule]:
    """The modules with a state, in layer order; found once per base, dtype and device, and again once one of them has
    been replaced. UnsupportedState if they cannot be served."""
    with probe_lock:
        found, key = _found.setdefault(base, {}), (base.dtype, base.device)
        if key not in found or not {one.module for one in found[key]}.issubset(base.modules()):
            found[key] = _find_modules(base)
        return found[key]


@torch.no_grad()
def _find_modules(base: PreTrainedModel) -> list[RecurrentModule]:
    name = type(base).__name__
    cache, states, keys, inputs = _trace(base)
    if not states:
        raise UnsupportedState(f"{name} keeps its recurrent state outside the cache, where it cannot be put back")
    found: list[RecurrentModule] = []
    for index, stacks in sorted(states.items()):
        module = stacks[0][_common_prefix_length(stacks) - 1]
        if any(module in stack for stack in keys.get(index, [])):
            raise UnsupportedState(
                f"{type(module).__name__} in {name} keeps a state beside its keys, and the two cannot be taken apart"
            )
        known = [one.one_by_one for one in found if type(one.module) is type(module)]
        alone = known[0] if known else _differs(index, module, inputs[module], cache, name)
        found.append(RecurrentModule(index, module, alone))
    return found


def _trace(base: PreTrainedModel) -> tuple[DynamicCache, dict, dict, dict]:
    """A pass over a few tokens → its cache; by layer, the stack of running modules at each write of a state, and of
    keys; and what each module was called with."""
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    running: list[nn.Module] = []
    states: dict[int, list[list[nn.Module]]] = {}
    keys: dict[int, list[list[nn.Module]]] = {}
    inputs: dict[nn.Module, Inputs] = {}

    def watch(name: str, writes: dict[int, list[list[nn.Module]]], position: int) -> None:
        write = getattr(cache, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            index = kwargs["layer_idx"] if "layer_idx" in kwargs else args[position]
            writes.setdefault(index, []).append(list(running))
            return write(*args, **kwargs)

        setattr(cache, name, watched)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        inputs[module] = Inputs(args, kwargs, 1, TOKENS)

    def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        running.pop()

    watch("update_conv_state", states, 1)
    watch("update_recurrent_state", states, 1)
    watch("update", keys, 2)
    hooks = []
    for module in base.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        ids = torch.arange(TOKENS, device=input_device(base)).unsqueeze(0) % embedding_count(base)
        base(input_ids=ids, use_cache=True, **{cache_argument(base): cache})
    except (ValueError, TypeError, AttributeError) as error:
        raise UnsupportedState(
            f"{type(base).__name__} keeps states, and not in transformers' own cache: {error}"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    for name in ("update_conv_state", "update_recurrent_state", "update"):
        delattr(cache, name)
    return cache, states, keys, inputs


def _common_prefix_length(stacks: list[list[nn.Module]]) -> int:
    """How many leading modules all stacks share."""
    shortest = min(map(len, stacks))
    same = (all(stack[depth] is stacks[0][depth] for stack in stacks) for depth in range(shortest))
    return next((depth for depth, one in enumerate(same) if not one), shortest)


def _differs(index: int, module: nn.Module, inputs: Inputs, cache: DynamicCache, name: str) -> bool:
    """Does its code give different outputs for several tokens after a state than for one at a time, as generate() feeds
    them?"""
    cell = StateCell(getattr(cache.layers[index], "number_of_states", 1))
    cache.layers[index] = cell
    rows = torch.zeros(1, dtype=torch.long)
    first, rest = (inputs.select(rows, columns.unsqueeze(0)) for columns in torch.arange(TOKENS).split(FIRST))
    out, state = RecurrentLayer(module, cell, module.forward).run(first, None)
    if not isinstance(out, Tensor):
        raise UnsupportedState(
            f"{type(module).__name__} in {name} keeps a state and gives several tensors, and only one can be put "
            "together from rows that differ in length"
        )
    together, alone = (
        RecurrentLayer(module, cell, module.forward, one_by_one).run(rest, state)[0] for one_by_one in (False, True)
    )
    difference = (together - alone).abs().max() / alone.abs().max().clamp_min(1e-9)
    return bool(difference > CLOSE.get(alone.dtype, 0.02))
