"""The forms of a parallel head's block on disk: tensor names of biases, convolutions and the selector, config keys, and
which of them a format holds. Their formulas: heads/block_logits.py, heads/layers/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import flag, real, whole
from specheads.options import shown

DSPARK_TYPES = ("vanilla", "gated", "rnn")
_MARKOV = {
    "gated": {"markov.gate_proj.weight": "gate_proj.weight", "markov.gate_proj.bias": "gate_proj.bias"},
    "rnn": {"markov.joint_proj.weight": "joint_proj.weight", "markov.joint_proj.bias": "joint_proj.bias"},
}
_SELECTOR = {
    "markov_embed.weight": "candidate_selector.predecessor_codebook",
    "markov_lm_head.weight": "candidate_selector.successor_codebook",
    "markov.proj.weight": "candidate_selector.hidden_projection.weight",
}
_DOMINO = {
    "markov.gru.weight_ih": "prefix_gru.weight_ih_l0", "markov.gru.weight_hh": "prefix_gru.weight_hh_l0",
    "markov.proj.weight": "embed_proj.0.weight", "markov_lm_head.weight": "embed_proj.2.weight",
}  # fmt: skip


def form_names(head: ParallelConfig) -> dict[str, str]:
    """Our name → theirs, of what a head has besides a plain DFlash's tensors."""
    names = {
        f"decoder.{i}.{conv}.{part}": f"layers.{i}.{conv}.{part}"
        for i in range(head.num_layers if head.conv_taps else 0)
        for conv in ("attention_conv", "mlp_conv")
        for part in ("base_kernel", "kernel_projection.weight")
    }
    if head.markov_rank and head.markov_type == "selector":
        names |= _SELECTOR
    elif head.markov_rank and head.markov_type == "domino":
        names |= _DOMINO
    elif head.markov_rank:
        names |= {f"markov_{ours}.weight": f"markov_head.markov_{theirs}.weight" for ours, theirs in _TABLES}
        names |= {ours: f"markov_head.{theirs}" for ours, theirs in _MARKOV.get(head.markov_type, {}).items()}
    if head.confidence:
        names |= {f"confidence.{w}": f"confidence_head.proj.{w}" for w in ("weight", "bias")}
    return names


_TABLES = (("embed", "w1"), ("lm_head", "w2"))


def form_refusals(head: ParallelConfig, takes: Sequence[str], convolved: bool, scaled: bool) -> list[str]:
    """Why a format cannot hold a head's form. takes: the types of bias that it holds; convolved: its blocks have
    convolutions; scaled: it holds the scale and the cap of logits."""
    wrong, extra = [], []
    if head.markov_rank and head.markov_type not in takes:
        extra.append("a Markov bias" if head.markov_type == "vanilla" else f"a bias of type {head.markov_type}")
    if head.confidence and not set(takes) & set(DSPARK_TYPES):
        extra.append("a confidence")
    if extra:
        wrong.append(f"it has {' and '.join(extra)}, which this format cannot hold")
    if bool(head.conv_taps) != convolved:
        wrong.append(f"its blocks have {'' if head.conv_taps else 'no '}convolutions (conv_taps), and this format's do"
                     f"{' not' if head.conv_taps else ''}")  # fmt: skip
    if not scaled and (head.logit_scale != 1 or head.logit_cap is not None):
        wrong.append("it scales or caps its logits (logit_scale, logit_cap), which this format cannot hold")
    return wrong


# DSpark


def dspark_keys(head: ParallelConfig) -> dict[str, Any]:
    """What `read_dspark_options` reads, except for sample_from_anchor."""
    return {
        "markov_rank": head.markov_rank, "markov_head_type": head.markov_type,
        "enable_confidence_head": head.confidence,
        "confidence_head_with_markov": head.markov_rank > 0 and head.confidence_markov,
    }  # fmt: skip


def read_dspark_options(files: Files, config: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """The options that a DSpark config adds. usual: defaults for missing keys. CheckpointError for a variant that heads
    here do not support."""
    rank = whole(config, "markov_rank", usual.get("markov_rank"), least=0)
    variant = config.get("markov_head_type", "vanilla")
    if rank and variant not in DSPARK_TYPES:
        raise CheckpointError(
            f"{files}: markov_head_type={shown(variant)}; heads here have {', '.join(DSPARK_TYPES)} ones"
        )
    sure = flag(config, "enable_confidence_head", default=usual.get("confidence", False))
    with_markov = flag(config, "confidence_head_with_markov", default=usual.get("confidence", False))
    return {
        "markov_rank": rank, "markov_type": variant if rank else "vanilla", "confidence": sure,
        "confidence_markov": with_markov or not (sure and rank),
        "sample_from_anchor": flag(config, "sample_from_anchor", default=True),
    }  # fmt: skip


# DFlash 2


def dflash2_keys(head: ParallelConfig) -> dict[str, Any]:
    """What `read_dflash2_options` reads."""
    return {
        "conv_kernel_size": head.conv_taps, "conv_group_size": head.conv_group, "selector_rank": head.markov_rank,
        "selector_top_k": head.candidates,
    }  # fmt: skip


def read_dflash2_options(config: dict[str, Any], usual: bool) -> dict[str, Any]:
    """The options that DFlash 2 adds. usual: whether missing keys have the published values, or are an error."""
    sizes = {"conv_taps": ("conv_kernel_size", 2), "conv_group": ("conv_group_size", 16)} | {
        "markov_rank": ("selector_rank", 256), "candidates": ("selector_top_k", 16),
    }  # fmt: skip
    read = {ours: whole(config, theirs, default if usual else None) for ours, (theirs, default) in sizes.items()}
    return {**read, "markov_type": "selector"}


def logit_keys(head: ParallelConfig, base: PreTrainedModel) -> dict[str, float]:
    """What `read_logit_options` reads, where it is not the usual."""
    scale, cap = base_logits(base)
    keys = {"output_multiplier": head.logit_scale * scale} if head.logit_scale * scale != 1 else {}
    return keys | ({"final_logit_softcapping": limit} if (limit := head.logit_cap or cap) is not None else {})


def read_logit_options(files: Files, config: dict[str, Any], base: PreTrainedModel) -> dict[str, Any]:
    """logit_scale and logit_cap of a head whose readers scale and cap the plain output matrix's logits, which the base
    may do itself. CheckpointError if the base's own cap is another."""
    scale, cap = base_logits(base)
    multiplier, limit = real(config, "output_multiplier", 1.0), config.get("final_logit_softcapping")
    limit = None if limit in (None, 0) else real(config, "final_logit_softcapping", 1.0)
    if cap is not None and (limit, multiplier) != (cap, scale):
        raise CheckpointError(
            f"{files}: its readers multiply logits by {multiplier:g} and cap them at {shown(limit)}, and the base by "
            f"{scale:g} and at {cap:g}; heads here draft through the base's own logits"
        )
    return {"logit_scale": multiplier / scale, "logit_cap": None if cap is not None else limit}


def base_logits(base: PreTrainedModel) -> tuple[float, float | None]:
    """How the base scales and caps the logits of its output matrix: (1, None) if it does not."""
    config = text_config(base)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return float(scale), getattr(config, "final_logit_softcapping", None)
