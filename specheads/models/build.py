"""Builds a head for a base, and the config that describes it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specheads.decoding.verify.model_inputs import input_device
from specheads.heads import HEADS, DraftHead, HeadConfig
from specheads.hub import commit_of
from specheads.models.base.fingerprint import fingerprint_base
from specheads.models.base.quantized import quantization_of
from specheads.models.config import SpecConfig
from specheads.models.files import absolute


def build_head(config: HeadConfig, base: PreTrainedModel) -> DraftHead:
    """A head with these (complete) options, on the base's input device."""
    with torch.device(input_device(base)):
        return HEADS[config.kind](config)


def build_spec_config(config: HeadConfig, base: PreTrainedModel) -> SpecConfig:
    """The checkpoint config of a head with these (complete) options beside `base`."""
    name = getattr(base, "name_or_path", None) or None
    # Absolute, because the process may be in another directory by the time it saves.
    described = SpecConfig.of(
        config, name and absolute(name), commit_of(base), fingerprint_base(base), quantization_of(base)
    )
    described.base_class = type(base).__name__
    return described
