"""Quantised models that scale activations by all tokens of a pass, so that its width changes its logits.

The packages that quantise need not be installed: classes and configs are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def scaled_by_pass(base: PreTrainedModel) -> str | None:
    """What of this model scales activations by all tokens of a pass, for messages; None if nothing is known to.

    A scale of each token's own (FP8 by row or block, int8 by token) does not depend on the pass, and is not meant.
    """
    found = next(filter(None, map(_scaled_module, base.modules())), None)
    return found or _scaled_config(getattr(base.config, "quantization_config", None))


def _scaled_module(module: nn.Module) -> str | None:
    kind = type(module)
    if kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return f"torch.ao's dynamic {kind.__name__}"  # one scale for the whole input
    # LLM.int8 finds the columns that it leaves in 16 bits by the largest value of any token.
    if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0) > 0:
        return "bitsandbytes' Linear8bitLt"
    weight = getattr(module, "weight", None)
    if type(weight).__module__.startswith("torchao") and any(
        "PerTensor" in repr(getattr(weight, name, None)) for name in ("act_quant_kwargs", "quant_kwargs")
    ):
        return f"torchao's {type(weight).__name__} with a scale per tensor"
    return None


def _scaled_config(config: Any) -> str | None:
    if config is None:
        return None
    settings = config if isinstance(config, Mapping) else config.to_dict()
    torchao = repr(getattr(config, "quant_type", settings.get("quant_type")))
    if "Float8DynamicActivation" in torchao and "PerRow" not in torchao:  # per tensor by default
        return "torchao's Float8DynamicActivation with a scale per tensor"
    for one in _mappings(settings):  # compressed-tensors, Quark
        is_dynamic = one.get("dynamic") is True or one.get("is_dynamic") is True
        if is_dynamic and (one.get("strategy") or one.get("qscheme")) in ("tensor", "per_tensor"):
            return f"{settings.get('quant_method')}'s dynamic activations with a scale per tensor"
    return None


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings inside a config."""
    if isinstance(value, Mapping):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _mappings(part)
