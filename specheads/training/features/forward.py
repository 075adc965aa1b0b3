"""What the base makes of a batch, as far up as it is needed: layers above the last tap are run for a law alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.target.hf_base import decoder_of
from specheads.heads.block import decoder_layers
from specheads.losses.teacher import Teacher, tap_base


class Forward:
    """One pass of a frozen base over a batch: its tapped layers, and its law where `needs_law`.

    early: does a pass end behind the last tapped layer? It does where no law is needed, the last layer is not tapped,
    and stopping is seen to give the same features on a few tokens.
    """

    def __init__(self, base: Any, layers: tuple[int, ...], needs_law: bool) -> None:
        self.base, self.layers, self.needs_law = base, layers, needs_law
        self.stack = decoder_layers(base)
        self.early = not needs_law and self.stack is not None and 0 < max(layers) < len(self.stack) and self._tried()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, mask: Any, position_ids: Tensor) -> tuple[Tensor, Teacher | None]:
        """input_ids, position_ids (B, T) → features (B, T, F), and the law or None."""
        if self.early:
            return self._stopped(input_ids, mask, position_ids), None
        features, teacher = tap_base(self.base, input_ids, mask, position_ids, self.layers)
        return features, teacher if self.needs_law else None

    def _tried(self) -> bool:
        place = self.base.get_input_embeddings().weight.device
        ids = torch.arange(4, device=place).unsqueeze(0)
        once = (ids, torch.ones_like(ids), ids)
        try:
            with torch.no_grad():
                return torch.equal(self._stopped(*once), tap_base(self.base, *once, self.layers)[0])
        except (KeyError, IndexError, TypeError, AttributeError):
            return False  # layers that hand their hidden states on in another way

    def _stopped(self, input_ids: Tensor, mask: Any, position_ids: Tensor) -> Tensor:
        assert self.stack is not None
        found: dict[int, Tensor] = {}
        top = max(self.layers)

        def keep(k: int, hidden: Any) -> None:
            found[k] = hidden[0] if isinstance(hidden, tuple) else hidden
            if k == top:
                raise _Enough

        handles = [_watch(self.stack, k, keep) for k in sorted(set(self.layers))]
        try:
            decoder_of(self.base)(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([found[k] for k in self.layers], -1)


class _Enough(Exception):
    """Not an error: the last layer that is tapped has been run."""


def _watch(stack: nn.ModuleList, k: int, keep: Any) -> Any:
    """hidden_states[k] is what layer k − 1 gives, and 0 what the first layer is given."""
    if k == 0:
        return stack[0].register_forward_pre_hook(lambda layer, args: keep(0, args))
    return stack[k - 1].register_forward_hook(lambda layer, args, output: keep(k, output))
