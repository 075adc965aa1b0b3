"""convert(): attach a draft head to a frozen base model.

If that base is trained instead of the model that convert() returned, backward() raises a clear error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.kernels.int8_linear import Int8Linear
from specheads.decoding.verify.hf_base import (
    UnsupportedModel,
    has_floating_weight,
    refuse_unsupported,
    text_config,
    unwrapped,
)
from specheads.heads import HeadConfig, head_config
from specheads.hub import hub_options
from specheads.models.base.fingerprint import record_base
from specheads.models.base.loading import as_dtype, keep_4bit_layout, load_language_model
from specheads.models.base.lora import JointConfig, attach
from specheads.models.checkpoint import build_head
from specheads.models.config import SpecConfig
from specheads.models.spec_model import SpecModel

if TYPE_CHECKING:
    from peft import LoraConfig


def convert(
    base: PreTrainedModel | str | os.PathLike[str],
    head: str | HeadConfig | list[Any],
    *,
    dtype: torch.dtype | str | None = None,
    init: bool = True,
    lora: JointConfig | LoraConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> SpecModel:
    """Freeze `base`, build a draft head beside it, and return both as a SpecModel.

    base: a Hugging Face decoder-only model, or its name. head: a name from `heads.HEADS`, a head config, or
    [(name, options)]; options: the head's, by name. dtype: of the head's parameters (default float32, which suits
    training). init: initialise the head from the base's own layers where shapes match. lora: add adapters to the base
    that train with the head (Medusa-2, see JointConfig); the base is then changed in place, and decodes with them.
    UnsupportedModel, a ValueError, says why a base cannot verify trees.
    """
    if isinstance(base, str | os.PathLike):
        base = load_language_model(base, **hub_options(base))
    base = unwrapped(base)
    keep_4bit_layout(base)
    refuse_unsupported(base)
    lm_head = base.get_output_embeddings()
    if not has_floating_weight(lm_head) and not isinstance(lm_head, Int8Linear):
        raise UnsupportedModel(
            f"the base's output matrix is quantised ({type(lm_head).__module__}.{type(lm_head).__name__}), and heads "
            "need its values: leave it out of what is quantised (llm_int8_skip_modules=['lm_head'] in bitsandbytes)"
        )
    if (streams := getattr(text_config(base), "altup_num_inputs", None) or 1) > 1:
        raise UnsupportedModel(
            f"{type(base).__name__} has {streams} streams of hidden states (AltUp), and a head reads one; prompt "
            "lookup and draft models serve it"
        )
    config = head_config(head, options)
    refuse_other_sizes(config, text_config(base))
    config = config.with_base_defaults(text_config(base)).with_base_positions(text_config(base))
    module = build_head(config, base)
    module.refuse_unfit(base.eval())
    module.copy_frozen_weights(base)
    if init:
        module.initialise(base)
    module.to(as_dtype(dtype) or torch.float32)
    described = record_base(SpecConfig.of(config), base)
    if lora is not None:
        joint = JointConfig.of(lora)
        attach(base, joint)
        described.joint = joint.to_dict()
    model = SpecModel(described, base, module)
    mark_frozen(base)
    return model


def refuse_other_sizes(config: HeadConfig, base_config: Any) -> None:
    """ValueError for a head config whose sizes are not this base's."""
    for name in ("hidden_size", "vocab_size"):
        value, base_size = getattr(config, name), getattr(base_config, name)
        if value not in (None, base_size):
            raise ValueError(f"{config.kind} head option {name}={value} is not the base's, {base_size}; leave it out")


def load_head(base: PreTrainedModel, directory: Any, **kwargs: Any) -> SpecModel:
    """Load the head saved in `directory` (or on the hub) beside a base that is already in memory.

    If it was trained with adapters of its base (Medusa-2), they are added to this base, with a line in the log.
    dtype: the head's; None: the base's; "auto": the one it was saved in. Others as in `SpecModel.from_pretrained`.
    """
    return SpecModel.from_pretrained(directory, base=base, **kwargs)


def explain_frozen(base: object) -> str:
    return (
        f"this {type(base).__name__} was frozen by specheads.convert(), whose result was not kept; write "
        "model = convert(...), and train that model"
    )


def mark_frozen(base: nn.Module) -> None:
    """Make backward() of the base's own loss raise a clear ValueError while all of the base is frozen.

    Only backward() raises: forward() and the value of the loss are unchanged.
    """
    if not is_frozen_base(base):
        base.register_forward_hook(_explain_backward)


def is_frozen_base(base: object) -> bool:
    """Was this model frozen by convert()?"""
    return isinstance(base, nn.Module) and _explain_backward in base._forward_hooks.values()


def _explain_backward(base: nn.Module, _args: Any, output: Any) -> Any:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
        output.loss = _Explained.apply(loss, torch.zeros((), requires_grad=True), explain_frozen(base))
    return output


class _Explained(torch.autograd.Function):
    """The identity, whose backward raises a ValueError."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _differentiable: Tensor, text: str) -> Tensor:
        ctx.text = text
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError(ctx.text)
