"""What a compiled graph depends on, as parts of its key."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from specheads.decoding.target.grouped_attention import NAME as GROUPED
from specheads.decoding.tree import DraftTree


def module_state(module: nn.Module) -> tuple:
    """The module, and what of it may change: modes, hooks, adapters, attention, the kind and shape of each tensor."""
    adapters = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    modules = []
    for part in module.modules():
        own = vars(part)
        # Asking a module for what it lacks would take most of the time.
        named = [str(getattr(part, name)) for name in adapters if name in own or hasattr(type(part), name)]
        attention = getattr(own.get("config"), "_attn_implementation", None)
        attention = "sdpa" if attention == GROUPED else attention  # while another thread is in a pass
        hooks = *own["_forward_hooks"], *own["_forward_pre_hooks"]
        modules.append((own["training"], id(own.get("forward")), *hooks, *named, attention))
    tensors = [(type(t), t.shape, t.dtype, t.device) for t in (*module.parameters(), *module.buffers())]
    tables = [t.shape for m in module.modules() if isinstance(t := getattr(m, "_table", None), Tensor)]
    return ref(module), hash(tuple(modules)), hash(tuple(tensors)), tuple(tables)


def torch_settings() -> tuple:
    """The settings of torch that its compiler makes code for, or would guard."""
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
    """A copy of a logits processor or rule whose options of these names are tensors, which a graph reads anew."""
    result = copy.copy(owner)
    for name in names:
        if isinstance(value := getattr(owner, name, None), float):
            dtype = torch.float32 if device.type == "mps" else torch.float64  # a number's own, where there is one
            vars(result)[name] = torch.tensor(value, dtype=dtype, device=device)
    return result


def constants_of(owner: Any) -> tuple:
    """The type of a logits processor or rule and the values of its attributes; of tensors, which a graph reads anew,
    the shapes."""
    return type(owner), tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(vars(owner).items())
    )


def draft_shapes(tree: DraftTree) -> tuple:
    """What a graph depends on of the draft's probabilities that a tree carries."""
    probs, logits = tree.probs, tree.logits
    return (
        None if probs is None else (probs.shape, probs.dtype),
        None if logits is None else (logits.logits.shape, logits.logits.dtype, logits.ids is None, logits.vocab_size),
    )
