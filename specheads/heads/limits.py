"""Checks of a head's options: their types, and bounds far above those of any real head.

A config may come from a stranger, so it is checked before memory is allocated for the sizes in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from specheads.options import shown

MAX_LAYERS = 64  # layers, or depths with a head each
DEEPEST = 1024  # tokens of one draft
MAX_NODES = 1024  # of a default static tree, and ranks at a node
MAX_POSITIONS = 2**27  # of a text
MAX_LISTED = 64  # entries of a list, such as tapped layers
_MAX_TABLES = 8  # tables and lists within one another
_ANY_LAYER = (-10_000, 10_000)  # `with_base_defaults` checks against the base's layers
# Option → (least, greatest) value.
BOUNDS: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 2**20), "vocab_size": (1, 2**24), "draft_vocab_size": (1, 2**24), "dpace": (0, 1),
    "num_attention_heads": (1, 2**12), "num_key_value_heads": (1, 2**12), "head_dim": (1, 2**14),
    "intermediate_size": (1, 2**24), "rms_norm_eps": (1e-20, 1), "num_layers": (1, MAX_LAYERS),
    "num_heads": (1, MAX_LAYERS), "tap": _ANY_LAYER, "taps": _ANY_LAYER, "draft_depth": (1, DEEPEST),
    "steps": (1, DEEPEST), "metric_steps": (1, DEEPEST), "decay": (1e-9, 1), "step_decay": (1e-9, 1),
    "anchors": (1, 2**20), "feature_weight": (0, 2**20), "token_loss_weight": (0, 2**20), "noise": (0, 2**20),
    "num_modules": (1, MAX_LAYERS), "layer_indices": (0, DEEPEST), "block_size": (1, DEEPEST),
    "markov_rank": (0, 2**16), "kv_lora_rank": (1, 2**14), "q_lora_rank": (1, 2**14), "qk_rope_head_dim": (2, 2**14),
    "v_head_dim": (1, 2**14), "mrope_axes": (0, 2), "mask_token_id": (0, 2**24), "sliding_window": (1, MAX_POSITIONS),
}  # fmt: skip
# Names of a config's entries, as patterns → (least, greatest) value; the first that fits counts.
_PLAUSIBLE = (
    (r"(^|_)eps(ilon)?$", 0, 1),
    (r"^rope_theta$", 1e-3, 2**50),
    (r"position|seq_len|max_len|context_len|window", -1, MAX_POSITIONS),
    (r"^num_(hidden_)?layers$|^n_layers?$|(en|de)coder_layers$", 0, 1024),
    (r"^num_|^n_(head|routed|shared)", -1, 2**14),
    (r"size|dim|rank|width", -1, 2**25),
    (r"", -(2**53), 2**53),
)
# Entries by which transformers chooses kernels, remote classes and quantisers.
_CODE = re.compile("implementation|auto_map|remote_code|quantization_config|use_kernels|kernel_config")
_SPECIAL = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_EXPECTED = {
    int: "a whole number", float: "a finite number", bool: "true or false", str: "text", tuple: "a list",
}  # fmt: skip


@cache
def _types(config: type) -> dict[str, tuple[type, bool]]:
    """Option → (type, whether it may be None)."""
    types = {}
    for name, hint in get_type_hints(config).items():
        parts = get_args(hint) if type(None) in get_args(hint) else (hint,)
        types[name] = (get_origin(parts[0]) or parts[0], type(None) in parts)
    return types


def bounds_of(config: Any) -> dict[str, tuple[float, float]]:
    """Option → (least, greatest) value, for the options of a head's config."""
    return BOUNDS | config.bounds


def check_options(config: Any) -> None:
    """ValueError for an option of the wrong type or out of bounds; for a list the bounds apply to each entry."""
    kind_of: Any = type(config)
    types, bounds = _types(kind_of), bounds_of(config)
    for option in fields(config):
        value, (kind, may_be_none) = getattr(config, option.name), types[option.name]
        said = f"{config.kind} head option {option.name}={shown(value)}"
        if (value is None and may_be_none) or kind is dict:  # its entries are checked where it is read
            continue
        if not _is(value, kind):
            raise ValueError(f"{said} must be {_EXPECTED[kind]}")
        if option.name not in bounds:
            continue
        least, most = bounds[option.name]
        entries = value if kind is tuple else (value,)
        if kind is tuple and not (len(value) <= MAX_LISTED and all(_is(entry, int) for entry in value)):
            raise ValueError(f"{said} must be a list of {MAX_LISTED} whole numbers at most")
        if any(entry < least for entry in entries):
            raise ValueError(f"{said} must be at least {least}")
        if any(entry > most for entry in entries):
            raise ValueError(f"{said} must be at most {most}")


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    if kind is tuple:
        return isinstance(value, tuple | list)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def chooses_code(name: str) -> bool:
    """Does transformers choose code by a config's entry of this name: a kernel, a remote class, a quantiser?"""
    return _CODE.search(name) is not None


def check_config_table(table: Mapping[str, Any], said: str) -> None:
    """ValueError, which begins with `said`, for a model's config that chooses code, or has a number that no model has.

    The rules are the same in nested tables. A model has an infinite number only as a limit.
    """
    for name, value in _entries(table, said):
        if chooses_code(name) and value not in (None, False):
            raise ValueError(f"{said}: {name}={shown(value)} chooses code, which a head's file may not; leave it out")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least, most = next((low, high) for pattern, low, high in _PLAUSIBLE if re.search(pattern, name))
        if not least <= value <= most and not (name.endswith("limit") and abs(value) == math.inf):
            raise ValueError(f"{said}: {name}={shown(value)} must be a number from {least:g} to {most:g}")


def _entries(table: Mapping[str, Any], said: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The names and values in a table and in those within it; the values in a list have the list's name."""
    if depth > _MAX_TABLES:
        raise ValueError(f"{said} is nested deeper than any config")
    for name, value in table.items():
        if isinstance(value, Mapping) and isinstance(text := value.get("__float__"), str):
            value = _SPECIAL.get(text, value)  # as transformers writes what JSON lacks
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _entries(value, said, depth + 1)
        for one in value if isinstance(value, list | tuple) else ():
            yield from _entries({name: one}, said, depth + 1)


def check_choices(kind: str, choices: Sequence[Sequence[int]], max_depth: int, vocabulary: int | None) -> None:
    """ValueError unless the choices of a static tree are paths of ranks that a head can draft: at most max_depth long,
    from a vocabulary of that size."""
    said = f"{kind} head option tree={shown(choices)}"
    if len(choices) >= MAX_NODES:
        raise ValueError(f"{said} has {len(choices)} choices; it must have fewer than {MAX_NODES}")
    for choice in choices:
        if not isinstance(choice, tuple | list) or not all(_is(rank, int) for rank in choice):
            raise ValueError(f"{said} must be a list of paths, each a list of ranks, not {shown(choice)}")
        if len(choice) > max_depth:
            raise ValueError(f"{said} is {len(choice)} deep, and such a head drafts {max_depth} tokens at most")
        most = min(MAX_NODES, vocabulary or MAX_NODES)
        if any(rank >= most for rank in choice):
            raise ValueError(f"{said} has rank {shown(max(choice))}, and a node of such a head has {most} at most")
