"""What the console decodes with: the target, and all that can draft for it, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specheads.commands import arguments
from specheads.convert import load_head
from specheads.drafters import Drafter, DraftModel, MaxGram, PromptLookup
from specheads.heads import DraftHead
from specheads.spec_model import SpecConfig

OF_TEXT = {"lookup": PromptLookup, "maxgram": MaxGram}


@dataclass
class Models:
    """The target and its tokenizer, and the drafters loaded so far: `head` and `model` where the command line gave
    them, others by the checkpoint's name. small: what else a draft model needs to write by itself."""

    target: PreTrainedModel
    tokenizer: Any
    dtype: torch.dtype | None
    place: torch.device
    drafters: dict[str, Drafter] = field(default_factory=dict)

    @classmethod
    def load(cls, source: str, *, assistant: str | None, base: str | None, dtype: str, device: str) -> Models:
        """source: a head checkpoint, or a plain Hugging Face model. ValueError or OSError with the reason."""
        wanted, place = arguments.placement(dtype, device)
        if is_head(source):
            model, tokenizer = arguments.load(source, base, dtype, device)
            models = cls(model.base, tokenizer, wanted, place, {"head": model.head})
        elif base is not None:
            raise ValueError(f"--base: {source} is a whole model, and no head that would stand on another base")
        else:
            target, tokenizer = plain(source, wanted, place)
            models = cls(target, tokenizer, wanted, place)
        if assistant is not None:
            models.drafters["model"] = models.draft_model(assistant)
        return models

    @property
    def best(self) -> str:
        """The drafter to begin with."""
        return next((name for name in ("model", "head") if name in self.drafters), "lookup")

    def drafter(self, name: str) -> Drafter:
        """By name, loaded when it is first asked for. ValueError or OSError where there is none."""
        if name not in self.drafters:
            if name in OF_TEXT:
                self.drafters[name] = OF_TEXT[name]()
            elif name in ("head", "model"):
                how = "a head checkpoint as MODEL" if name == "head" else "--assistant SMALL_MODEL"
                raise ValueError(f"there is no {name} to draft with: start with {how}, or name a checkpoint")
            elif is_head(name):
                self.drafters[name] = load_head(self.target, name, dtype=self.dtype).head
            else:
                self.drafters[name] = self.draft_model(name)
        return self.drafters[name]

    def draft_model(self, source: str) -> DraftModel:
        small, tokenizer = plain(source, self.dtype, self.place)
        return DraftModel(small, tokenizer=tokenizer, target_tokenizer=self.tokenizer)


def is_head(source: str) -> bool:
    return isinstance(AutoConfig.from_pretrained(source), SpecConfig)


def plain(source: str, dtype: torch.dtype | None, place: torch.device) -> tuple[PreTrainedModel, Any]:
    """A decoder-only Hugging Face model and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
    return model.to(place).eval(), AutoTokenizer.from_pretrained(source)


def described(name: str, drafter: Drafter) -> str:
    """`eagle3 head`, `draft model Qwen/Qwen3-0.6B`, `lookup`."""
    if isinstance(drafter, DraftHead):
        return f"{drafter.config.kind} head"
    if isinstance(drafter, DraftModel):
        return f"draft model {drafter.small.name_or_path}"
    return name
