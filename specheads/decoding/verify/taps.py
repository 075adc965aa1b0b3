"""The states of a base that heads read: its hidden_states, and the last layer's output before the final norm.

Transformers returns hidden_states 0 (embeddings) to n (after the final norm) of n layers, and not the last layer's
output, which some heads read. It is tap n + 1 here, taken by a forward hook that is there only during a pass.

Shapes: B batch rows, T positions, H hidden size, F = tapped layers × hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import (
    UnsupportedModel,
    concat_taps,
    decoder_of,
    hidden_state_indices,
    layer_count,
    text_config,
)


def last_output(config: Any) -> int:
    """The tap of the last layer's output before the final norm, for a base with this text config."""
    return layer_count(config) + 1


def refuse_missing_taps(taps: Sequence[int], config: Any) -> None:
    """ValueError if a base with this text config has no such states."""
    layers = layer_count(config)
    for tap in taps:
        if not 0 <= tap <= last_output(config):
            raise ValueError(
                f"tapped layer {tap} does not exist: the base has {layers} layers, so hidden_states 0 to {layers}, and "
                f"{layers + 1} for the last layer's output before the final norm"
            )


def decoder_layers(base: Any) -> nn.ModuleList | None:
    """The base's decoder layers: the first ModuleList in its text decoder that has as many modules as layers."""
    count = layer_count(text_config(base))
    return next((m for m in decoder_of(base).modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


class _Waiting(threading.local):
    """The passes of this thread that wait for the last layer's output, innermost last."""

    def __init__(self) -> None:
        self.outputs: list[Tensor | None] = []


_waiting = _Waiting()
_traced: list[Tensor | None] = []  # the same while torch traces a pass, which it does in one thread at a time


def keep_output(layer: nn.Module, args: Any, output: Any) -> None:
    """The hook. A pass of another thread, which waits for nothing, runs it too."""
    outputs = _traced if torch.compiler.is_compiling() else _waiting.outputs
    if outputs:
        outputs[-1] = output[0] if isinstance(output, tuple) else output


@contextmanager
def last_output_kept(base: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[None]:
    """In the block, `run_tapped` can read the last layer's output, if it is among these taps."""
    if last_output(text_config(base)) not in layers:
        yield
        return
    stack = decoder_layers(base)
    if stack is None:
        raise UnsupportedModel(
            f"{type(base).__name__}: its last layer was not found, so its output before the final norm (tap "
            f"{last_output(text_config(base))}) cannot be read"
        )
    handle = stack[-1].register_forward_hook(keep_output)
    try:
        yield
    finally:
        handle.remove()


def run_tapped(
    base: PreTrainedModel, part: Any, layers: tuple[int, ...], ids: Tensor, **arguments: Any
) -> tuple[Any, Tensor]:
    """A pass of `part`, the base or its decoder, in `last_output_kept` → its output and the taps (B, T, F). ids (B, T):
    the tokens of the pass. UnsupportedModel for a tap that the base does not give."""
    last = last_output(text_config(base))
    states = tuple(k for k in layers if k != last)
    waits = states != layers
    outputs = _traced if torch.compiler.is_compiling() else _waiting.outputs
    if waits:
        outputs.append(None)
    try:
        out = part(output_hidden_states=hidden_state_indices(states), **arguments)
    finally:
        kept = outputs.pop() if waits else None
    features = concat_taps(out.hidden_states, states, ids)
    if not waits:
        return out, features
    if kept is None or kept.dim() != 3 or kept.shape[:2] != ids.shape:
        raise UnsupportedModel(f"{type(base).__name__}: tap {last}, its last layer's output, is not a state a token")
    found = dict(zip(states, features.chunk(max(1, len(states)), -1), strict=False)) | {last: kept.to(ids.device)}
    return out, torch.cat([found[k] for k in layers], -1)
