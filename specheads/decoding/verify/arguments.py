"""A model's forward(): the names of its arguments and of its cache argument, and the device of its inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

# transformers: `cache` since 5.24, `past_key_values` before. Code shipped with a checkpoint may use either.
CACHE_NAMES = ("past_key_values", "cache")
if "cache" in inspect.signature(create_causal_mask).parameters:
    CACHE_NAMES = ("cache", "past_key_values")


def forward_arguments(base: PreTrainedModel) -> set[str]:
    """The argument names of the model's forward(). If that takes **kwargs (a wrapper, a decorator), they are passed on,
    so the names of its class's forward() count too, and so on up the base classes."""
    names: set[str] = set()
    for forward in (base.forward, *(vars(cls)["forward"] for cls in type(base).__mro__ if "forward" in vars(cls))):
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def cache_argument(base: PreTrainedModel) -> str:
    """The name under which forward() and generate() take the cache."""
    names = forward_arguments(base)
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def input_device(base: PreTrainedModel) -> torch.device:
    """The device for a base's ids and of its outputs, which a base spread over several devices sends back there."""
    embeddings: Any = base.get_input_embeddings()
    # Between calls an offloaded layer's weight is on meta, and its hook knows where it computes.
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    if device is None:
        # Of a quantised module `weight` may be a method, or be missing.
        weight = embeddings.weight if isinstance(embeddings.weight, torch.Tensor) else next(base.parameters())
        device = weight.device
    return torch.device(device)


def embedding_count(base: PreTrainedModel) -> int:
    """How many ids have an input embedding; 0 where a launcher shards the matrix."""
    embeddings: Any = base.get_input_embeddings()
    # Of a quantised module `weight` may be a method.
    return len(embeddings.weight) if isinstance(embeddings.weight, torch.Tensor) else embeddings.num_embeddings
