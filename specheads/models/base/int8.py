"""Bases with int8 weights on a CPU: rounded as they are loaded, one scale per output channel.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=specheads.Int8Config())

is transformers' own way of loading a quantised model, in which the config is recorded. Linear layers become
`Int8Linear`, the output matrix among them; embeddings, norms and biases stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specheads.decoding.kernels.int8_linear import Int8Linear

METHOD = "specheads_int8"


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """For `quantization_config=` of from_pretrained(): int8 weights, on a CPU. It has no options."""

    def __init__(self, quant_method: str = METHOD) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # an enumeration of transformers' own methods


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """What from_pretrained() calls. Weights are read as they were saved, and rounded then."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = {torch.device(d).type for d in (device_map or {}).values()} if isinstance(device_map, dict) else set()
        if others := sorted(devices - {"cpu"}):
            raise ValueError(
                f"int8 weights are for CPUs, and device_map has {', '.join(others)}: load the base there in 8 bits "
                "with bitsandbytes, or without quantisation"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        to_int8(model)
        return model

    def is_serializable(self) -> bool:
        return False  # they are made of the model's files in seconds

    @property
    def is_trainable(self) -> bool:
        return True  # adapters and heads beside it

    @property
    def is_compileable(self) -> bool:
        return True


def to_int8(model: nn.Module) -> None:
    """Replace the linear layers of a model, one after the other. Embeddings stay, also those that were the weight of a
    layer too. ValueError for weights that are not finite or not in memory."""
    replaced = {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if module.weight.is_meta:
            raise ValueError(f"the weight of {name} is not in memory: int8 needs the whole model on the CPU")
        if module not in replaced:
            replaced[module] = Int8Linear.of(module)
        model.set_submodule(name, replaced[module])
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _untie(part)


def _untie(model: PreTrainedModel) -> None:
    """transformers ties weights anew when a model is resized, say: not those of int8."""
    for name in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, name, None)
        if isinstance(tied, dict):
            setattr(model, name, {key: source for key, source in tied.items() if not _is_int8(model, key)})


def _is_int8(model: nn.Module, weight: str) -> bool:
    path = weight.rpartition(".")[0]
    return any(name == path and isinstance(module, Int8Linear) for name, module in model.named_modules())
