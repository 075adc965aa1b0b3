"""Muon: orthogonalised momentum for the hidden matrices of a model.

Jordan 2024; the scaling to AdamW's root mean square: arXiv:2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from specheads.decoding.probs.precision import bfloat16_is_fast

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic iteration, chosen for the steepest slope at zero
ITERATIONS = 5


class Muon(Optimizer):
    """torch.optim.Muon, but in float32 on processors without fast bfloat16, where torch's takes up to 80 times as long.

    params: 2-D parameters, or groups of them. like_adamw: scale steps to AdamW's root mean square, so that AdamW's
    learning rates fit; otherwise by √max(1, rows / columns).
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1,
        like_adamw: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.like_adamw = like_adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonalize(parameter.grad.lerp(buffer, momentum))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * self._scale(*parameter.shape))

    def _scale(self, rows: int, columns: int) -> float:
        return 0.2 * math.sqrt(max(rows, columns)) if self.like_adamw else math.sqrt(max(1, rows / columns))


def orthogonalize(matrix: Tensor, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz: (R, C) → (R, C) with the same singular vectors, and singular values of about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if bfloat16_is_fast(matrix.device) else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
