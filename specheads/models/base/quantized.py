"""Bases in 4 or 8 bits with bitsandbytes, as in QLoRA (arXiv:2305.14314): loading, and recording in checkpoints.

Only a frozen base is quantised; heads and adapters stay in floating point.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import is_bitsandbytes_available

from specheads.options import reason, shown


def quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """The quantisation config. bits 4: NF4, computed in `dtype`; 8: LLM.int8. ImportError without bitsandbytes."""
    if not is_bitsandbytes_available():
        raise ImportError(f"load_in_{bits}bit needs bitsandbytes: pip install bitsandbytes")
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )


def quantization_of(base: Any) -> dict[str, Any] | None:
    """How a base is quantised, from its config; None if it is not."""
    found = getattr(base.config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else found.to_dict()


def quantization_options(recorded: dict[str, Any] | None, name: str, **options: Any) -> dict[str, Any]:
    """Options that load the base `name` quantised as recorded; {} if its own files are already quantised.

    options: of AutoConfig. ValueError if `recorded` is no quantisation config."""
    if recorded is None or getattr(AutoConfig.from_pretrained(name, **options), "quantization_config", None):
        return {}
    try:
        return {"quantization_config": AutoQuantizationConfig.from_dict(recorded)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"base_quantization={shown(recorded)} is not a quantisation ({reason(error)})") from error
