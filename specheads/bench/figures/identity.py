"""What tells a base, drafter or machine apart from others with the same name, as plain values for a result's key."""

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
    """The base's weights (as sums), config, generation config and dtype."""
    return [fingerprint_base(base), _options(base.config), _options(base.generation_config), str(base.dtype)]


def identify_drafter(drafter: Drafter, device_type: str) -> list[Any]:
    """The drafter's weights (as sums), options and data: the bigrams of MaxGram, the step costs of `auto`. [] if its
    name identifies it."""
    if isinstance(drafter, AutoDrafter):
        head = [] if drafter.head is None else identify_drafter(drafter.head, device_type)
        shipped = [
            shipped_costs(device_type, compiled=compiled, large=large)
            for compiled in (False, True)
            for large in (False, True)
        ]
        tables = [costs for costs in (drafter.costs, drafter.compiled_costs) if costs] or shipped
        return [head, *map(_digest_costs, tables)]
    if isinstance(drafter, MaxGram):
        return [] if drafter.bigrams is None else [digest(list(drafter.bigrams))]
    if isinstance(drafter, DraftHead):
        return [weight_sums(drafter), drafter.config.to_dict()]
    if isinstance(drafter, DraftModel):
        return [weight_sums(drafter.small), _options(drafter.small.config)]
    return []


def weight_sums(module: Any) -> list[float]:
    """The sum of each weight of a module, in float64, to tell modules apart; [] if it is not a module."""
    if not isinstance(module, nn.Module):
        return []
    return [float(weight.detach().double().sum()) for weight in module.parameters()]


def identify_machine(device: Any) -> dict[str, Any]:
    """The device, hardware and versions, but not the load, which keeps changing."""
    known = {name: value for name, value in environment().items() if name != "load_average"}
    return {"device": str(device), **known}


def _digest_costs(table: CostTable) -> str:
    return digest({rows: costs.to_dict() for rows, costs in table.batches.items()}, table.acceptance)


def _options(config: Any) -> dict[str, Any]:
    """A config's options except for where it was loaded from."""
    options: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in options.items() if name != "_name_or_path"}
