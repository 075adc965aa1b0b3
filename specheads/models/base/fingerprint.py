"""The fingerprint of a base, which a head's checkpoint stores."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import first_layer, text_config

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
    if any(p.is_meta or p.numel() == 0 for p in weights):
        return {**record, "weights": None}
    # In bfloat16, so that the digest does not depend on the dtype in which the base is loaded. A float16 base is the
    # exception, as it rounds differently and flushes small values, so its digest is marked.
    sample = [p.reshape(-1)[:: max(1, p.numel() // 16)].to("cpu", torch.bfloat16) for p in weights]
    values = torch.cat(sample).view(torch.int16).numpy()
    mark = _FLOAT16 if any(p.dtype == torch.float16 for p in weights) else ""
    return {**record, "weights": mark + hashlib.sha256(values.tobytes()).hexdigest()[:16]}


def weights_differ(one: str | None, other: str | None) -> bool:
    """Do two digests show that weights differ? No if one is unknown, or if only one was taken in float16."""
    if not one or not other or str(one).startswith(_FLOAT16) != str(other).startswith(_FLOAT16):
        return False
    return one != other


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of the entries in which two fingerprints differ; unknown entries do not count."""
    known = [name for name in one if one[name] is not None and other.get(name) is not None]
    return [n for n in known if (weights_differ(one[n], other[n]) if n == "weights" else one[n] != other[n])]
