"""What a model's forward() takes: the names of its arguments, what it calls its cache, and on which device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

# transformers says `cache` since 5.24, and said `past_key_values` before; code beside a checkpoint may say either.
CACHE_NAMES = ("past_key_values", "cache")
if "cache" in inspect.signature(create_causal_mask).parameters:
    CACHE_NAMES = ("cache", "past_key_values")


def forward_arguments(base: PreTrainedModel) -> set[str]:
    """The argument names of the model's forward(). One with **kwargs (a wrapper, a decorator) passes them on, so the
    names of its class's forward() count too, and so on up the base classes."""
    names: set[str] = set()
    for forward in (base.forward, *(vars(cls)["forward"] for cls in type(base).__mro__ if "forward" in vars(cls))):
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def cache_argument(base: PreTrainedModel) -> str:
    """The name under which forward() takes its cache, and generate() too."""
    names = forward_arguments(base)
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def input_device(base: PreTrainedModel) -> torch.device:
    """Where a base takes its ids, and gives its outputs, which one that is spread over devices sends back there."""
    embeddings: Any = base.get_input_embeddings()
    # An offloaded layer has its weight on meta between its calls, and a hook that knows where it computes.
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device(embeddings.weight.device if device is None else device)
