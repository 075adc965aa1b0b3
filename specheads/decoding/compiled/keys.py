"""What a compiled graph depends on besides models and rules, as parts of its key."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specheads.decoding.tree import DraftTree


def torch_settings() -> tuple:
    """The settings of torch that compiled code depends on, or that guards would check."""
    products, hooks = torch.backends.cuda.matmul, vars(torch.nn.modules.module)
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        products.fp32_precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        # Which kernels of attention may be chosen.
        *(
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        ),
        # Hooks of all modules; their numbers are not used again.
        *(tuple(hooks[name]) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")),
    )


def options_as_tensors(owner: Any, device: torch.device, names: Sequence[str]) -> Any:
    """A copy of a logits processor or rule with these options as tensors, whose values a graph reads at each call."""
    result = copy.copy(owner)
    for name in names:
        if isinstance(value := getattr(owner, name, None), float):
            dtype = torch.float32 if device.type == "mps" else torch.float64  # that of a Python float; MPS has none
            vars(result)[name] = torch.tensor(value, dtype=dtype, device=device)
    return result


def draft_shapes(tree: DraftTree) -> tuple:
    """What a graph depends on in the draft probabilities that a tree carries."""
    probs, logits = tree.probs, tree.logits
    return (
        None if probs is None else (probs.shape, probs.dtype),
        None if logits is None else (logits.logits.shape, logits.logits.dtype, logits.ids is None, logits.vocab_size),
    )
