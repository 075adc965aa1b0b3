"""Rotary positions in foreign configs: reading, writing, and which scaled variants each program supports.

Heads are published with rope_theta and rope_scaling, which transformers 4 and 5 read, or with rope_parameters, their
replacement in transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.utils import logging as hf_logging

from specheads.heads.config import DecoderConfig
from specheads.heads.layers.rope import SHARE, USUAL_THETA, complete_rope, rope_options
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import flag, real, table, whole, wholes
from specheads.options import shown

logger = hf_logging.get_logger(__name__)
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True)
class Positions:
    """The rotary positions that a program supports: its rope types, the YaRN options that it reads, whether it applies
    rope_theta with scaled ones, and whether a part of each head may be rotated alone."""

    types: tuple[str, ...] = ("linear", "llama3", "yarn")
    yarn: tuple[str, ...] = _YARN
    theta: bool = True
    partial: bool = False

    def refusals(self, head: DecoderConfig) -> list[str]:
        """Why the program does not support the head's positions; [] if it does."""
        assert head.rope_parameters
        kind, theta = head.rope_parameters["rope_type"], head.rope_parameters["rope_theta"]
        share = head.rope_parameters.get(SHARE, 1)
        if share != 1 and not self.partial:
            return [f"it rotates {share:g} of each attention head, and its readers rotate all of it"]
        if kind == "default":
            return []
        wrong = f"its positions are scaled (rope_type {kind})"
        if kind not in self.types:
            return [f"{wrong}, and its readers have {', '.join(self.types)}"]
        if not self.theta and theta != USUAL_THETA:
            return [f"{wrong} with rope_theta={theta:g}, and its readers then take {USUAL_THETA:g}"]
        if kind == "yarn" and (other := [name for name in _YARN if name in head.rope_parameters.keys() - self.yarn]):
            return [f"{wrong} with {', '.join(other)}, which its readers do not heed"]
        return []


EVERY = Positions(partial=True)
USUAL = Positions(yarn=("beta_fast", "beta_slow"))
SGLANG = Positions(yarn=("beta_fast", "beta_slow", "truncate"), partial=True)
GGUF = Positions(("linear", "yarn"), yarn=("beta_fast", "beta_slow"))  # Qwen3's blocks in llama.cpp
LINEAR = Positions(("linear",), theta=False)  # for code that predates the other types


def rope_keys(head: DecoderConfig) -> dict[str, Any]:
    """Config keys that transformers 4 and 5 both read. `type` is for the EAGLE repository, which ignores rope_type."""
    assert head.rope_parameters
    top = {name: head.rope_parameters[name] for name in ("rope_theta", SHARE) if name in head.rope_parameters}
    scaling = {name: value for name, value in head.rope_parameters.items() if name not in top}
    kind = scaling["rope_type"]
    return top | ({} if kind == "default" else {"rope_scaling": {"type": kind, **scaling}})


def read_rope(files: Files, config: dict[str, Any]) -> dict[str, Any]:
    """The rope_parameters of a config. Default: plain RoPE with a base of 10000, since consumers ignore the target's.

    CheckpointError if the two spellings disagree. What no head supports is refused by the head's options.
    """
    tables = {name: table(config, name) for name in ("rope_parameters", "rope_scaling") if table(config, name)}
    spellings = [_filled(files, config, rope) for rope in tables.values()] or [_filled(files, config, {})]
    if config.get("rope_theta") is not None:
        spellings.append({**spellings[0], "rope_theta": real(config, "rope_theta", USUAL_THETA)})
    if any(other != spellings[0] for other in spellings):
        raise CheckpointError(
            f"{files}: its {', '.join(tables)} and rope_theta do not say the same; take away what is wrong"
        )
    return spellings[0]


def _filled(files: Files, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The rope_parameters of one spelling. Keys that its type does not have are not read, so they are refused later."""
    kind = _text_type(files, rope)
    options = {name: rope.get(name) for name in rope_options(kind)}
    shares = [real(section, SHARE, 1.0) for section in (config, rope) if section.get(SHARE) is not None]
    if len({*shares}) > 1:
        raise CheckpointError(f"{files}: its config says {SHARE}={shares[0]:g} and {shares[1]:g}; take one away")
    options[SHARE] = shares[0] if shares and shares[0] != 1 else None
    longest, original = whole(config, "max_position_embeddings", 2048), config.get("original_max_position_embeddings")
    if original is not None and "original_max_position_embeddings" in options:
        options["original_max_position_embeddings"] = original
    known = {name: value for name, value in options.items() if value is not None}
    theta = real(config if rope.get("rope_theta") is None else rope, "rope_theta", USUAL_THETA)
    return {**complete_rope({"rope_type": kind, **known}, longest), "rope_theta": theta}


def _text_type(files: Files, rope: dict[str, Any]) -> Any:
    """The rope type for text, whose positions have one number. With mrope each position has three, which differ only
    for images and videos; says so in the log."""
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    kind = next((kind for kind in kinds if kind not in ("mrope", "default")), "default")
    if any(other not in (kind, "mrope", "default") for other in kinds):
        raise CheckpointError(f"{files}: its config says rope_type={shown(kinds[0])} and type={shown(kinds[1])}")
    flag(rope, "mrope_interleaved")  # which of the three numbers turns which frequency: for text they are equal
    if wholes(rope, "mrope_section") is not None or "mrope" in kinds:
        logger.warning(
            "%s: positions of images and videos (mrope) are read as those of text: exact for text prompts; after an "
            "image fewer drafts may be accepted, and an export says nothing of mrope", files,
        )  # fmt: skip
    return kind
