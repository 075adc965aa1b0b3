"""A pass of the base no deeper than needed: layers above the last tap run only if its probabilities are needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.verify.hf_base import decoder_of
from specheads.decoding.verify.model_inputs import input_device
from specheads.decoding.verify.taps import decoder_layers
from specheads.losses.teacher import Teacher, tap_base


class Forward:
    """One pass of a frozen base over a batch: its tapped layers, and its next-token distribution where `needs_teacher`.

    early: does a pass end after the last tapped layer? It does if no distribution is needed, the last layer is not
    tapped, and stopping gives the same features on a few tokens.
    """

    def __init__(self, base: Any, layers: tuple[int, ...], needs_teacher: bool) -> None:
        self.base, self.layers, self.needs_teacher = base, layers, needs_teacher
        self.stack = decoder_layers(base)
        stops_inside = self.stack is not None and 0 < max(layers) < len(self.stack)
        self.early = not needs_teacher and stops_inside and self._stopping_agrees()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, mask: Any, position_ids: Tensor) -> tuple[Tensor, Teacher | None]:
        """input_ids, position_ids (B, T) → features (B, T, F), and the teacher or None."""
        if self.early:
            return self._stopped(input_ids, mask, position_ids), None
        features, teacher = tap_base(self.base, input_ids, mask, position_ids, self.layers)
        return features, teacher if self.needs_teacher else None

    def _stopping_agrees(self) -> bool:
        ids = torch.arange(4, device=input_device(self.base)).unsqueeze(0)
        inputs = (ids, torch.ones_like(ids), ids)
        try:
            with torch.no_grad():
                return torch.equal(self._stopped(*inputs), tap_base(self.base, *inputs, self.layers)[0])
        except (KeyError, IndexError, TypeError, AttributeError):
            return False  # layers that pass on their hidden states in another form

    def _stopped(self, input_ids: Tensor, mask: Any, position_ids: Tensor) -> Tensor:
        assert self.stack is not None
        states: dict[int, Tensor] = {}
        top = max(self.layers)

        def keep(k: int, hidden: Any) -> None:
            states[k] = hidden[0] if isinstance(hidden, tuple) else hidden
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
        return torch.cat([states[k] for k in self.layers], -1)


class _Enough(Exception):
    """Ends a pass after the last tapped layer; not an error."""


def _watch(stack: nn.ModuleList, k: int, keep: Any) -> Any:
    """Call keep(k, …) with hidden_states[k], the output of layer k − 1 (for k = 0 the input of the first layer)."""
    if k == 0:
        return stack[0].register_forward_pre_hook(lambda layer, args: keep(0, args))
    return stack[k - 1].register_forward_hook(lambda layer, args, output: keep(k, output))
