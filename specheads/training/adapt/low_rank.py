"""Low-rank adapters on a head's linear layers, which train in its place and are merged into it at the end (LoRA,
arXiv:2106.09685)."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from specheads.heads import DraftHead


def attach(head: DraftHead, rank: int) -> list[nn.Module]:
    """Freeze the head and add adapters, which change nothing yet, to each linear layer; returns them. An output
    matrix whose weights the loss reads itself stays as it is. ValueError if there are no linear layers."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    config = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=True)
    found = [(parent, name, layer) for parent in head.modules() for name, layer in parent.named_children()
             if type(layer) is nn.Linear]  # fmt: skip
    if not found:
        raise ValueError(f"a head of kind {head.config.kind} has no linear layers to adapt: leave rank out")
    head.requires_grad_(False)
    adapted: list[nn.Module] = []
    for parent, name, layer in found:
        wrapped = Linear(layer, "default", config=config, r=rank, lora_alpha=2 * rank)
        setattr(parent, name, wrapped)
        adapted.append(wrapped)
    return adapted


class Merged(TrainerCallback):
    """Puts plain layers with the adapters' sum back before the head is saved."""

    def __init__(self, model: Any, adapted: list[nn.Module]) -> None:
        self.model, self.adapted = model, adapted

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parent in list(self.model.head.modules()):
            for name, layer in list(parent.named_children()):
                if layer in self.adapted:
                    layer.merge()
                    setattr(parent, name, layer.get_base_layer())
