"""What identifies a base, and recording it in the config of a head."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import first_layer, text_config
from specheads.hub import commit_of
from specheads.models.base.loading import quantization_of
from specheads.models.config import SpecConfig
from specheads.models.files import absolute

_SIZES = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
_FLOAT16 = "float16:"


def fingerprint_base(base: PreTrainedModel) -> dict[str, Any]:
    """What identifies a base: the sizes in its config, and a digest of a few values of every weight.

    The digest is None if some weights are not in memory (on meta, offloaded or sharded)."""
    config = first_layer(text_config(base))
    record = {name: getattr(config, name, None) for name in _SIZES}
    weights = [p.detach() for p in base.parameters() if p.is_floating_point()]
    if [p for p in weights if p.is_meta or p.numel() == 0]:
        return {**record, "weights": None}
    # In bfloat16, so that the digest does not depend on the dtype in which the base is loaded. A float16 base is the
    # exception, as it rounds differently and flushes small values, so its digest is marked.
    sample = [_dense(p).reshape(-1)[:: max(1, p.numel() // 16)].to("cpu", torch.bfloat16) for p in weights]
    values = torch.cat(sample).view(torch.int16).numpy()
    mark = _FLOAT16 if torch.float16 in {p.dtype for p in weights} else ""
    return {**record, "weights": mark + hashlib.sha256(values.tobytes()).hexdigest()[:16]}


def _dense(weight: Tensor) -> Tensor:
    """A weight as a plain tensor: torchao's quantised ones call themselves floating point, and have no reshape."""
    return weight.dequantize() if type(weight).__module__.startswith("torchao.") else weight


def record_base(config: SpecConfig, base: PreTrainedModel, fingerprint: dict[str, Any] | None = None) -> SpecConfig:
    """Record in a head's config that it is beside `base`, and return the config. Its name and revision stay where the
    base does not know its own. fingerprint: the base's, if known."""
    name = getattr(base, "name_or_path", None) or config.base_model_name_or_path
    # Absolute, because the process may be in another directory by the time it saves.
    config.base_model_name_or_path = name and absolute(name)
    config.base_revision = commit_of(base) or config.base_revision
    config.base_fingerprint = fingerprint_base(base) if fingerprint is None else fingerprint
    config.base_class = type(base).__name__
    config.base_quantization = quantization_of(base)
    return config


def weights_differ(first: str | None, other: str | None) -> bool:
    """Do two digests show that weights differ? No if one is unknown, or if only one was taken in float16."""
    if not first or not other or str(first).startswith(_FLOAT16) != str(other).startswith(_FLOAT16):
        return False
    return first != other


def differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of the entries in which two fingerprints differ; unknown entries do not count."""
    known = [name for name in first if first[name] is not None and other.get(name) is not None]
    return [n for n in known if (weights_differ(first[n], other[n]) if n == "weights" else first[n] != other[n])]
