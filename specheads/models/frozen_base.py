"""A base that convert() froze says so where it is trained in place of the model that convert() returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def explain_frozen(base: object) -> str:
    return (
        f"this {type(base).__name__} was frozen by specheads.convert(), whose result was not kept; use "
        "model = convert(...), and train that"
    )


def mark_frozen(base: nn.Module) -> None:
    """Let `base` explain itself where its own loss is differentiated while nothing of it learns.

    By its loss, and not by forward() or a Trainer: the loss can be read as ever, and backward() alone raises.
    """
    if not is_frozen_base(base):
        base.register_forward_hook(_explain_backward)


def is_frozen_base(base: object) -> bool:
    """Has convert() put a head beside this model?"""
    return isinstance(base, nn.Module) and _explain_backward in base._forward_hooks.values()


def _explain_backward(base: nn.Module, _args: Any, output: Any) -> Any:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
        output.loss = _Explained.apply(loss, torch.zeros((), requires_grad=True), explain_frozen(base))
    return output


class _Explained(torch.autograd.Function):
    """The loss itself; its gradient is a ValueError."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, _differentiable: Tensor, text: str) -> Tensor:
        ctx.text = text
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError(ctx.text)
