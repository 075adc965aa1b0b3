"""Observed: what a base computes in someone else's training pass, kept for a `HeadUpdater` by hooks.

The pass, its outputs and its gradients stay as they are. Shapes: B batch rows, T positions, H hidden.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.verify.hf_base import UnsupportedModel, decoder_of, layer_count, text_config, without_dropout
from specheads.decoding.verify.model_inputs import input_device
from specheads.decoding.verify.taps import decoder_layers
from specheads.losses.teacher import gives_logits, tap_base
from specheads.training.online import HeadUpdater, Sample


class Observed:
    """Hooks on an updater's base, from `install` to `remove`.

    Once armed, the next pass with gradients leaves a sample. Passes without gradients (rollouts, a reference model's
    part, old log-probabilities) and what activation checkpointing recomputes leave none.
    """

    def __init__(self, updater: HeadUpdater) -> None:
        self.updater, self.base = updater, updater.base
        self.decoder, self.last = decoder_of(self.base), layer_count(text_config(self.base))
        self.armed = False
        self.sample: Sample | None = None
        self._states: dict[int, Tensor] | None = None  # by tap, of the pass that runs now
        self._inputs: dict[str, Any] = {}
        self._handles: list[Any] = []

    def install(self) -> None:
        """UnsupportedModel, leaving no hooks, unless they find the states that decoding gives the head."""
        layers = decoder_layers(self.base)
        if layers is None or not gives_logits(self.base):
            raise self._unsupported("its layers, or its logits from its last hidden states, were not found")
        self._handles = [
            self.base.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.decoder.register_forward_pre_hook(self._open, with_kwargs=True),
            self.decoder.register_forward_hook(self._close, always_call=True),
        ]
        for tap in {*self.updater.taps} - {self.last}:
            self._handles.append(self._watch(layers, tap))
        try:
            self._check()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.take()

    def arm(self) -> None:
        self.armed, self.sample = True, None

    def take(self) -> Sample | None:
        """The sample of a pass since `arm`, if there was one with something to learn."""
        sample, self.armed, self.sample = self.sample, False, None
        return sample

    def _watch(self, layers: nn.ModuleList, tap: int) -> Any:
        def entering(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            keep(args[0] if args else kwargs.get("hidden_states"))

        def leaving(layer: nn.Module, args: Any, output: Any) -> None:
            keep(output[0] if isinstance(output, tuple) else output)

        def keep(state: Any) -> None:
            if self._states is not None and isinstance(state, Tensor):
                self._states[tap] = state.detach()

        if tap == 0:
            return layers[0].register_forward_pre_hook(entering, with_kwargs=True)
        return layers[min(tap, self.last) - 1].register_forward_hook(leaving)

    def _begin(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The decoder is not given the labels."""
        self._inputs = {"labels": kwargs.get("labels")}

    def _open(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (self.armed and torch.is_grad_enabled()):
            return
        given = {**dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)), **kwargs}
        if given.get("input_ids") is not None:
            self._states = {}
            self._inputs |= {name: given.get(name) for name in ("input_ids", "attention_mask", "position_ids")}

    def _close(self, decoder: nn.Module, args: Any, output: Any) -> None:
        states, self._states = self._states, None
        inputs, self._inputs = self._inputs, {}
        if states is None or output is None:  # not armed, or the pass raised an error
            return
        mask = inputs.pop("attention_mask")
        states[self.last] = output[0].detach()
        self.sample = self.updater.sample(
            states, None, inputs.pop("input_ids"), **inputs,
            attention_mask=mask if isinstance(mask, Tensor) and mask.dim() == 2 else None,
        )  # fmt: skip
        self.armed = self.sample is None

    def _check(self) -> None:
        ids = torch.arange(4, device=input_device(self.base)).unsqueeze(0)
        self.arm()
        with without_dropout(self.base):
            with torch.no_grad():
                features, _ = tap_base(self.base, ids, torch.ones_like(ids), ids, self.updater.head.layers)
            with torch.enable_grad():
                self.base(input_ids=ids, use_cache=False)
        sample = self.take()
        if sample is None or not torch.allclose(
            sample.features, features, rtol=1e-2, atol=0.01 * float(features.std())
        ):
            raise self._unsupported("what its layers return is not what it gives as hidden states")

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{type(self.base).__name__}: {reason}, so a head cannot follow its training passes by itself; leave it as "
            "it is (every=None), or give HeadUpdater.step() the outputs of each pass"
        )
