"""Converts a decoder layer's tensors between a checkpoint's form and that of transformers' class, by its own rules.

transformers stores some layers differently from checkpoints: all experts in one tensor, for instance.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from specheads.decoding.verify.taps import decoder_layers
from specheads.heads.mtp.target_layers import read_table
from specheads.models.files import WIDE, CheckpointError, changes_dtype, widest_dtype

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
    from transformers.modeling_utils import LoadStateDictConfig
except ImportError:  # transformers before it had conversion rules
    get_model_conversion_mapping = None  # type: ignore[assignment]


class LayerTensors:
    """Converts layers of the target with this config table (`heads.mtp.target_layers.config_table`)."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        if get_model_conversion_mapping is None:
            raise CheckpointError("MTP modules are read by transformers' own conversion rules; upgrade transformers")
        self.table = dict(table)
        self._empty = _empty_model(self.table)
        layers = decoder_layers(self._empty)
        assert layers is not None
        self.count = len(layers)
        self.prefix = next(name for name, module in self._empty.named_modules() if module is layers)

    def from_checkpoint(self, tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor] | str:
        """The tensors, by transformers' names, of a layer like the target's at `index`; or why they do not form such a
        layer."""
        model = copy.deepcopy(self._empty)
        layers = decoder_layers(model)
        assert layers is not None
        set_dtype(layers[index], tensors)  # transformers casts to the model's dtypes
        renamed = {f"{self.prefix}.{index}.{name}": tensor for name, tensor in tensors.items()}
        rules: Any = get_model_conversion_mapping(model)
        config = LoadStateDictConfig(weight_mapping=rules, device_map={"": "cpu"})
        level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=renamed, load_config=config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            logging.set_verbosity(level)
            if shown:
                logging.enable_progress_bar()
        state = layers[index].state_dict()
        missing = sorted(name for name, tensor in state.items() if tensor.is_meta)
        wrong = [f"unknown {name}" for name in sorted(info.unexpected_keys)]
        wrong += [f"missing {name}" for name in missing]
        wrong += [f"shape of {each[0]}" for each in sorted(info.mismatched_keys, key=str)]
        wrong += list(map(str, info.conversion_errors))
        return "; ".join(wrong[:4]) if wrong else state

    def to_checkpoint(self, tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """The reverse of `from_checkpoint`."""
        prefix = f"{self.prefix}.{index}."
        written = revert_weight_conversion(self._empty, {prefix + name: tensor for name, tensor in tensors.items()})
        return {name.partition(f"layers.{index}.")[2]: tensor for name, tensor in written.items()}


def set_dtype(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a meta layer the dtype of a checkpoint's tensors, and each WIDE tensor its own dtype there."""
    changing = [tensor for name, tensor in tensors.items() if changes_dtype(name, tensor)]
    if changing:
        layer.to(widest_dtype(changing))
    for name, buffer in list(layer.named_buffers()):
        if name.endswith(WIDE):
            path, _, buffer_name = name.rpartition(".")
            kept = [tensor.dtype for theirs, tensor in tensors.items() if theirs.endswith(buffer_name)]
            layer.get_submodule(path)._buffers[buffer_name] = buffer.to(kept[0] if kept else buffer.dtype)


def _empty_model(table: dict[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(read_table(table))
