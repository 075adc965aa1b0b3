"""The base that a server's text is compared with: its weights here, and what of them an audit has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.audit.scoring import Scorer
from specheads.hub import hub_options
from specheads.models.base.loading import placement, settle_dtype, stop_ids


@dataclass(frozen=True)
class Base:
    """name: a folder or hub id; served: the dtype in which a server runs it unless it is told otherwise, that of its
    checkpoint; eos: the ids that end its texts."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    served: torch.dtype
    eos: frozenset[int]

    @classmethod
    def load(cls, name: str, tokenizer: Any, model: PreTrainedModel | None = None) -> Base:
        """On the device and in the dtype that "auto" means here. model: if it is loaded already, in the dtype of its
        checkpoint; it is changed."""
        hub = hub_options(name)
        _, device = placement("auto", "auto")
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **hub) if model is None else model
        served = loaded.dtype
        settle_dtype(loaded, device)
        loaded.to(device)
        return cls(name, loaded, tokenizer, served, frozenset(stop_ids(name, loaded.config, tokenizer, **hub)))

    def scorer(self, served: torch.dtype | None = None) -> Scorer:
        """served: the dtype that the server was told."""
        return Scorer(self.model, served or self.served)
