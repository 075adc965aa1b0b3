"""The models of a sweep: the target, its tokenizer, and each drafter, loaded on first use."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedModel

from specheads.bench import cost
from specheads.bench.figures.identity import identify_base, identify_drafter
from specheads.bench.sweep.grid import PLAIN, Sweep
from specheads.decoding.drafters import Cascade, Drafter
from specheads.models.named import KNOWN, Models, holds_head, refuse_unknown_name
from specheads.options import OptionError


class Bench:
    """The models of one sweep on one device."""

    def __init__(self, sweep: Sweep, dtype: str = "auto", device: str = "auto") -> None:
        """ValueError or OSError, with the reason, for a target or a head that cannot be loaded."""
        self._cascades: dict[tuple[str, str], Cascade] = {}
        self._costs: dict[tuple[int, ...], list[float]] = {}
        self.sweep = sweep
        named = [part for name in sweep.drafters for part in name.removeprefix("cascade:").split("+")]
        known = (PLAIN, *KNOWN)
        for name in named:
            refuse_unknown_name(name, known, "drafter")
        paths = (name for name in named if name.partition(":")[0] not in known)
        head = next(filter(holds_head, paths), None)
        if head is not None:
            self.models = Models.load(head, base=sweep.base, dtype=dtype, device=device)
            self.models.drafters[head] = self.models.drafters["head"]  # "auto" uses this one too
        elif sweep.base:
            self.models = Models.load(sweep.base, dtype=dtype, device=device)
        else:
            raise OptionError("no head among the drafters names the target; say which it is by {base}", base=...)
        self.base: PreTrainedModel = self.models.target
        self.tokenizer = self.models.tokenizer
        for setting in sweep.settings():  # so that a wrong name fails before the sweep starts
            drafter = self.drafter(setting.drafter, setting.k_matrix)
            if isinstance(drafter, Cascade) and sweep.cost != "measured":
                self.costs(drafter)

    def drafter(self, name: str, k_matrix: str = "") -> Drafter | None:
        """The drafter of this name, loaded once; None for PLAIN. k_matrix: that of a cascade, as JSON."""
        if name == PLAIN:
            return None
        if not name.startswith("cascade:"):
            return self.models.drafter(name)
        if (name, k_matrix) not in self._cascades:
            asked, rows = self.sweep, json.loads(k_matrix)
            self._cascades[name, k_matrix] = self.models.cascade(name, rows, asked.leniency, asked.notation)
        return self._cascades[name, k_matrix]

    def costs(self, cascade: Cascade) -> list[float] | None:
        """Cost of a pass of the target and of each draft, by the sweep's cost model; None if a draft is a head, whose
        cost is unknown."""
        if cascade.has_head:
            return None
        models = [self.base, *(getattr(draft, "small", None) for draft in cascade.drafts)]
        if self.sweep.cost != "measured":
            return cost.published(self.sweep.cost, [getattr(model, "name_or_path", None) for model in models])
        key = tuple(id(model) for model in models)
        if key not in self._costs:
            self._costs[key] = cost.measured(models)
        return self._costs[key]

    def identity(self) -> list[Any]:
        """What tells these models apart from others with the same names; for a cascade, its parts."""
        named = sorted(self.models.drafters.items(), key=lambda item: item[0])
        drafters = [[name, identify_drafter(drafter, self.base.device.type)] for name, drafter in named]
        return [identify_base(self.base), drafters]
