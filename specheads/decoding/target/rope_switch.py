"""Rotary positions whose frequencies change with the length of the text (`longrope`, `dynamic`).

Such a model chooses its frequencies by the largest position of a pass, so a pass that looks ahead could choose others
than the pass over the next token alone. Up to the boundary rows draft only where no node crosses it; they wait for one
another there, since the largest position of a batch is that of its longest row. Beyond it `longrope` has one set of
frequencies for good, `dynamic` another at each length, so that nothing can be drafted.
Shapes: B batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging as hf_logging

logger = hf_logging.get_logger(__name__)


@dataclass
class RopeSwitch:
    """kind: longrope or dynamic. room: tokens that may be fed after the prompts before a pass crosses the boundary.
    rereads: does the model read its whole text again when it crosses, as Phi-3 does?"""

    kind: str
    boundary: int
    room: int
    rereads: bool
    warned: bool = False

    def is_past(self, fed: list[int]) -> bool:
        """fed: how many tokens after the prompt each row that goes on has been fed. Have all come to the boundary?"""
        return min(fed) >= self.room

    def must_wait(self, fed: int) -> bool:
        """Does a row with so many tokens fed wait for the others?"""
        return fed >= self.room

    def may_draft(self, fed: list[int], depth: int) -> bool:
        """May the next tree be so deep? Says once where it may not."""
        if self.is_past(fed):
            allowed = self.kind == "longrope"
        else:
            allowed = max(n for n in fed if not self.must_wait(n)) + depth < self.room
        if not allowed and not self.warned:
            self.warned = True
            after = "goes on behind them" if self.kind == "longrope" else "does not go on"
            logger.warning(
                "the rotary positions of this model change at %d tokens (%s): nothing is drafted around them, and "
                "drafting %s", self.boundary, self.kind, after,
            )  # fmt: skip
        return allowed


def rope_switch(base: PreTrainedModel, config: Any, columns: int, padded: int) -> RopeSwitch | None:
    """The switch of a base with these settings behind prompts that take `columns` positions; None where there is none.

    padded: how wide the prompts were given, by which the model counts when it reads them again.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    several = [own for own in parameters.values() if isinstance(own, dict)] or [parameters]
    kinds = {own.get("rope_type"): own for own in several}
    if (own := kinds.get("longrope")) is not None:
        boundary = int(own.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        rereads = padded <= columns <= boundary and _rereads(base, boundary)
        return RopeSwitch("longrope", boundary, boundary - columns, rereads)
    if any("dynamic" in str(kind) for kind in kinds):
        boundary = int(config.max_position_embeddings)
        return RopeSwitch("dynamic", boundary, boundary - columns, False)
    return None


def _rereads(base: PreTrainedModel, boundary: int) -> bool:
    """Does the model itself drop its cache at the first token beyond the boundary? It is asked."""
    prepare: Any = base.prepare_inputs_for_generation
    ids = torch.zeros(1, boundary + 1, dtype=torch.long, device=base.device)
    held, states = DynamicCache(), torch.zeros(1, 1, boundary, 1, device=base.device)
    held.update(states, states, 0)
    made = prepare(ids, past_key_values=held, next_sequence_length=1, is_first_iteration=False, use_cache=True)
    return made.get("past_key_values") is None
