"""Optimizers for heads: a learning rate per group of parameters, and Muon for matrices with AdamW for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from specheads.training.trainer.muon import Muon

Group = dict[str, Any]


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
