"""Builds a head for a base, and the config that describes it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specheads.heads import HEADS, DraftHead, HeadConfig
from specheads.hub import commit_of
from specheads.models.base.fingerprint import fingerprint_base
from specheads.models.base.quantized import quantization_of
from specheads.models.config import SpecConfig


def build_head(config: HeadConfig, base: PreTrainedModel) -> DraftHead:
    """A head with these (complete) options, on the device of the base's output layer."""
    with torch.device(base.get_output_embeddings().weight.device):
        return HEADS[config.kind](config)


def build_spec_config(config: HeadConfig, base: PreTrainedModel) -> SpecConfig:
    """The checkpoint config of a head with these (complete) options beside `base`."""
    name = getattr(base, "name_or_path", None) or None
    return SpecConfig.of(config, name, commit_of(base), fingerprint_base(base), quantization_of(base))
