"""What tells a base, a drafter and a machine from others of the same names, as plain values for the key of a result."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specheads.bench.environment import environment
from specheads.bench.figures.results import digest
from specheads.decoding.drafters import AutoDrafter, Drafter, DraftModel, MaxGram
from specheads.decoding.planner.by_cost import CostTable, shipped_costs
from specheads.heads import DraftHead
from specheads.models.base.fingerprint import fingerprint_base


def identify_base(base: PreTrainedModel) -> list[Any]:
    """Its weights, config and generation config, and the dtype."""
    return [fingerprint_base(base), _options(base.config), _options(base.generation_config), str(base.dtype)]


def identify_drafter(drafter: Drafter, device_type: str) -> list[Any]:
    """Its weights, its options and what it drafts by: the bigrams of MaxGram, the step costs of `auto`. [] where its
    name says all."""
    if isinstance(drafter, AutoDrafter):
        head = [] if drafter.head is None else identify_drafter(drafter.head, device_type)
        eager = drafter.costs or shipped_costs(device_type)
        compiled = drafter.compiled_costs or drafter.costs or shipped_costs(device_type, compiled=True)
        return [head, _digest_costs(eager), _digest_costs(compiled)]
    if isinstance(drafter, MaxGram):
        return [] if drafter.bigrams is None else [digest(list(drafter.bigrams))]
    if isinstance(drafter, DraftHead):
        return [weight_sums(drafter), drafter.config.to_dict()]
    if isinstance(drafter, DraftModel):
        return [weight_sums(drafter.small), _options(drafter.small.config)]
    return []


def weight_sums(module: Any) -> list[float]:
    """The sum of each weight of a module, in float64, which tells it from others of its name; [] for anything else."""
    if not isinstance(module, nn.Module):
        return []
    return [float(weight.detach().double().sum()) for weight in module.parameters()]


def identify_machine(device: Any) -> dict[str, Any]:
    """The device, hardware and versions, without the load, which changes by the minute."""
    known = {name: value for name, value in environment().items() if name != "load_average"}
    return {"device": str(device), **known}


def _digest_costs(table: CostTable) -> str:
    return digest({rows: costs.to_dict() for rows, costs in table.batches.items()}, table.acceptance)


def _options(config: Any) -> dict[str, Any]:
    """A config's options but for where it was loaded from."""
    options: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in options.items() if name != "_name_or_path"}
