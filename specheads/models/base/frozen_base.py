"""A clear error if the frozen base is trained instead of the model that convert() returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
