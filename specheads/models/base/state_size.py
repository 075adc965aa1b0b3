"""How much memory the states of recurrent layers take during generation, from the base's config alone."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from specheads.decoding.verify.hf_base import has_state
from specheads.decoding.verify.model_inputs import cache_argument
from specheads.models.base.loading import auto_class

TOKENS = 6  # length of the pass that writes the states; their size does not depend on it


@dataclass(frozen=True)
class StateSize:
    """bytes_per_row: size of one snapshot, the states of all recurrent layers after one row's text."""

    bytes_per_row: int

    def held(self, paths: int = 1) -> int:
        """How many snapshots per row are held while a tree with so many root-to-leaf paths is verified: one after the
        committed text, and one at the end of each path. A chain has one path."""
        return 1 + paths

    def line(self) -> str:
        """The size as text, for people."""
        return (
            f"{self.bytes_per_row / 1e6:,.2f} MB a row and snapshot; {self.held()} snapshots held in a step with a "
            "chain, 1 + paths with a tree"
        )


def state_size(config: Any, dtype: torch.dtype | str | None = None) -> StateSize | None:
    """The state size of a base with this config and weights of this dtype (None: the config's own). None without
    recurrent layers, or if states are kept outside transformers' own cache: such a base is refused."""
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):  # nothing is allocated, and no value can be read
        base = auto_class(config).from_config(deepcopy(config), **options)
        if not has_state(base):
            return None
        if hasattr(base, "set_experts_implementation"):
            base.set_experts_implementation("batched_mm")  # other implementations read which experts were chosen
        cache = DynamicCache(config=base.config.get_text_config(decoder=True))
        try:
            with torch.no_grad():
                ids = torch.zeros(1, TOKENS, dtype=torch.long)
                base(input_ids=ids, use_cache=True, **{cache_argument(base): cache})
        except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError):
            return None
    states = [
        state
        for layer in cache.layers
        for kind in ("conv_states", "recurrent_states")
        for state in getattr(layer, kind, {}).values()
        if state is not None
    ]
    return StateSize(sum(state.numel() * state.element_size() for state in states)) if states else None
