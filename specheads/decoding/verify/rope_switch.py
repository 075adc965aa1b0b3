"""Rotary positions whose frequencies change with the length of the text (`longrope`, `dynamic`).

Such a model chooses its frequencies by the largest position of a pass, so a pass over a tree could choose different
ones from a pass over the next token alone. Before the boundary, rows draft only if no node crosses it, and at the
boundary they wait for one another, since a batch's largest position is that of its longest row. Past it, `longrope`
keeps one set of frequencies; `dynamic` has a different one at each length, so nothing can be drafted.
Shapes: B batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.verify.model_inputs import cache_argument, input_device

logger = hf_logging.get_logger(__name__)


@dataclass
class RopeSwitch:
    """kind: longrope or dynamic. room: tokens that may be fed after the prompts before a pass crosses the boundary.

    rereads: does the model read its whole text again when it crosses, as Phi-3 does? min_fed: the fewest tokens that
    any running row has been fed after its prompt; inactive rows get positions as if they had been fed that many. In
    methods, fed: how many tokens each running row has been fed.
    """

    kind: str
    boundary: int
    room: int
    rereads: bool
    min_fed: int = 0
    warned: bool = False

    def is_past(self, fed: list[int]) -> bool:
        """Have all rows reached the boundary?"""
        return min(fed) >= self.room

    def must_wait(self, fed: int) -> bool:
        """Must a row that has been fed so many tokens wait for the others?"""
        return fed >= self.room

    def may_draft(self, fed: list[int], depth: int) -> bool:
        """May the next tree be so deep? Logs one warning, the first time it may not."""
        if self.is_past(fed):
            allowed = self.kind == "longrope"
        else:
            allowed = max(n for n in fed if not self.must_wait(n)) + depth < self.room
        if not allowed and not self.warned:
            self.warned = True
            after = "resumes after that" if self.kind == "longrope" else "ends there"
            logger.warning(
                "the rotary positions of this model change at %d tokens (%s): nothing is drafted around them, and "
                "drafting %s", self.boundary, self.kind, after,
            )  # fmt: skip
        return allowed


def rope_switch(base: PreTrainedModel, config: Any, columns: int, padded: int) -> RopeSwitch | None:
    """The switch of a base with this config, after prompts of `columns` positions; None if it has none.

    padded: the prompts' width with padding, which counts when the model reads them again.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    several = [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
    kinds = {one.get("rope_type"): one for one in several}
    if (longrope := kinds.get("longrope")) is not None:
        boundary = int(longrope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        rereads = padded <= columns <= boundary and _rereads(base, boundary)
        return RopeSwitch("longrope", boundary, boundary - columns, rereads)
    if any("dynamic" in str(kind) for kind in kinds):
        boundary = int(config.max_position_embeddings)
        return RopeSwitch("dynamic", boundary, boundary - columns, False)
    return None


def _rereads(base: PreTrainedModel, boundary: int) -> bool:
    """Does the model drop its cache at the first token past the boundary? Tested with a cache of that length."""
    prepare: Any = base.prepare_inputs_for_generation
    ids = torch.zeros(1, boundary + 1, dtype=torch.long, device=input_device(base))
    cache, states = DynamicCache(), torch.zeros(1, 1, boundary, 1)
    cache.update(states, states, 0)
    name = cache_argument(base)
    prepared = prepare(ids, next_sequence_length=1, is_first_iteration=False, use_cache=True, **{name: cache})
    return prepared.get(name) is None
