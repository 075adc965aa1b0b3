"""Optimizers for heads: a learning rate per group of parameters, and Muon for matrices with AdamW for the rest.

Muon is orthogonalised momentum for hidden matrices: Jordan 2024; the scaling to AdamW's root mean square:
arXiv:2502.16982.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specheads.decoding.probs.precision import bfloat16_is_fast

Group = dict[str, Any]
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic iteration, chosen for the steepest slope at zero
ITERATIONS = 5


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float,
    decayed: Iterable[str],
    multipliers: Mapping[str, float],
) -> list[Group]:
    """Trainable parameters grouped by learning rate and weight decay, in order.

    multipliers: regular expression → factor on the learning rate; the first that matches a parameter's name counts.
    ValueError for one that matches none.
    """
    decayed = set(decayed)
    used: set[str] = set()
    groups: dict[tuple[float, bool], Group] = {}
    names = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        names.append(name)
        pattern = next((p for p in multipliers if re.search(p, name)), None)
        used |= {p for p in multipliers if re.search(p, name)}
        factor = 1.0 if pattern is None else float(multipliers[pattern])
        key = (factor, name in decayed)
        decay = weight_decay if name in decayed else 0.0
        group = groups.setdefault(key, {"params": [], "names": [], "lr": learning_rate * factor, "weight_decay": decay})
        group["params"].append(parameter)
        group["names"].append(name)
    if unused := [p for p in multipliers if p not in used]:
        raise ValueError(f"head_lr_groups: {unused[0]!r} matches no parameter; the head's are {', '.join(names)}")
    return list(groups.values())


class MuonAdamW(Optimizer):
    """Muon on the head's hidden matrices, AdamW on everything else, as one optimizer.

    groups: from parameter_groups. Embeddings and output matrices (names with "lm_head" or "embed") go to AdamW. Both
    use the same learning rate.
    """

    def __init__(self, groups: list[Group], *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        matrices: list[Group] = []
        others: list[Group] = []
        for group in groups:
            for is_matrix, into in ((True, matrices), (False, others)):
                pairs = zip(group["names"], group["params"], strict=True)
                params = [p for name, p in pairs if is_hidden_matrix(name, p) == is_matrix]
                if params:
                    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
                    into.append({"params": params, **rates, "muon": is_matrix})
        if not matrices or not others:
            raise ValueError(f"muon=true needs matrices and other parameters to train: {len(matrices)}, {len(others)}")
        self._muon = Muon(matrices)
        self._adamw = AdamW(others, betas=betas, eps=eps)
        # All three share the group dicts, so that a scheduler's new rate reaches the optimizer that steps.
        super().__init__(self._muon.param_groups + self._adamw.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, muon in ((self._muon, True), (self._adamw, False)):
            # Assigned at each step: load_state_dict replaces the groups and the state.
            optimizer.param_groups = [group for group in self.param_groups if group["muon"] == muon]
            optimizer.state = self.state
            optimizer.step()
        return loss


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not re.search(r"lm_head|embed", name)


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
