"""What a compiled graph depends on, as parts of its key."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from specheads.decoding.target.grouped_attention import NAME as GROUPED
from specheads.decoding.target.taps import keep_output
from specheads.decoding.tree import DraftTree


def module_state(module: nn.Module) -> tuple:
    """The module, and what may change about it: modes, hooks, adapters, attention, kinds and shapes of its tensors."""
    adapters = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    modules = []
    for part in module.modules():
        own = vars(part)
        # getattr for what a module lacks would take most of the time.
        named = [str(getattr(part, name)) for name in adapters if name in own or hasattr(type(part), name)]
        attention = getattr(own.get("config"), "_attn_implementation", None)
        attention = "sdpa" if attention == GROUPED else attention  # another thread may be in a pass
        kept = (key for key, hook in own["_forward_hooks"].items() if hook is not keep_output)  # there during a pass
        hooks = *kept, *own["_forward_pre_hooks"]
        modules.append((own["training"], id(own.get("forward")), *hooks, *named, attention))
    tensors = [(type(t), t.shape, t.dtype, t.device) for t in (*module.parameters(), *module.buffers())]
    tables = [t.shape for m in module.modules() if isinstance(t := getattr(m, "_table", None), Tensor)]
    return ref(module), hash(tuple(modules)), hash(tuple(tensors)), tuple(tables)


def torch_settings() -> tuple:
    """The settings of torch that compiled code depends on, or that guards would check."""
    products = torch.backends.cuda.matmul
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        products.fp32_precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
    )


def options_as_tensors(owner: Any, device: torch.device, names: Sequence[str]) -> Any:
    """A copy of a logits processor or rule with these options as tensors, whose values a graph reads at each call."""
    result = copy.copy(owner)
    for name in names:
        if isinstance(value := getattr(owner, name, None), float):
            dtype = torch.float32 if device.type == "mps" else torch.float64  # that of a Python float; MPS has none
            vars(result)[name] = torch.tensor(value, dtype=dtype, device=device)
    return result


def constants_of(owner: Any) -> tuple:
    """The type of a logits processor or rule and the values of its attributes; only the shapes of tensors, whose values
    a graph reads at each call."""
    return type(owner), tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(vars(owner).items())
    )


def draft_shapes(tree: DraftTree) -> tuple:
    """What a graph depends on in the draft probabilities that a tree carries."""
    probs, logits = tree.probs, tree.logits
    return (
        None if probs is None else (probs.shape, probs.dtype),
        None if logits is None else (logits.logits.shape, logits.logits.dtype, logits.ids is None, logits.vocab_size),
    )
