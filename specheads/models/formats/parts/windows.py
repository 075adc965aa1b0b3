"""Sliding windows in foreign configs, as transformers spells them and the readers of heads agree on them.

A layer has a window if its entry in layer_types says so; the window counts the token itself. Read in the code of vLLM
0.33 and speculators 0.9.0 (EAGLE-3, DFlash, DSpark) and SGLang 0.5.23 (DFlash, DSpark; its EAGLE-3 has a window on the
command line alone). vLLM also reads DFlash's use_swa, by which every layer has one. For slots of a block speculators
trains with a window that is counted from the root; its servers count it from each slot, and so do heads here. The same
holds for EAGLE-3's later steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specheads.heads import ParallelConfig
from specheads.heads.config import DecoderConfig
from specheads.heads.layers.windows import FULL, SLIDING
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import agreed, flag, quoted, table, whole

ANY_CAUSAL = (True, False, None)  # of `slots_causal`
_TABLE = "dflash_config"


def read_windows(files: Files, config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The head options of a decoder's config, {} for full attention. CheckpointError unless it says what each of its
    `layers` layers has."""
    kinds, used, size = (config.get(name) for name in ("layer_types", "use_sliding_window", "sliding_window"))
    inner = table(config, _TABLE)
    if flag(inner, "use_swa"):
        size, used = whole(inner, "swa_window_size", size), True
        if kinds is None or (isinstance(kinds, list) and SLIDING not in kinds):
            kinds = [SLIDING] * layers
    if isinstance(kinds, list) and kinds == [FULL] * len(kinds) and not used:
        return {}
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds)
    ):
        expected = f"expected {FULL} or {SLIDING} for each of its {layers}"
        raise CheckpointError(f"{files}: its config says layer_types={quoted(kinds)}; {expected}")
    if kinds is None and (used or (size is not None and used is None)):
        claim = f"use_sliding_window={quoted(used)}" if used else f"sliding_window={quoted(size)}"
        raise CheckpointError(
            f"{files}: its config says {claim}, and not which layers have the window, on which readers disagree; write "
            f'layer_types, a list of {FULL} or {SLIDING} by layer, or "use_sliding_window": false'
        )
    if kinds is None or SLIDING not in kinds:
        if used:
            raise CheckpointError(f"{files}: its config says use_sliding_window=true, and layer_types has no {SLIDING}")
        return {}
    if used is False:
        raise CheckpointError(
            f"{files}: its config says layer_types={quoted(kinds)} and use_sliding_window=false; its readers would "
            "disagree"
        )
    window = {"sliding_window": whole({"sliding_window": size}, "sliding_window")}
    return window | ({"layer_types": tuple(kinds)} if FULL in kinds else {})


def window_keys(head: DecoderConfig) -> dict[str, Any]:
    """What `read_windows` reads; {} without windows."""
    if head.sliding_window is None:
        return {}
    kinds = [FULL if reach.kind == "full" else SLIDING for reach in head.reaches]
    return {"layer_types": kinds, "sliding_window": head.sliding_window, "use_sliding_window": True}


def refuse_at_top(files: Files, layers: int) -> None:
    """CheckpointError if the config around a nested decoder's says that layers have windows."""
    if read_windows(files, files.config, layers):
        raise CheckpointError(
            f"{files}: its config says layer_types={quoted(files.config.get('layer_types'))} beside its decoder's own "
            "config, where nobody reads it; take it away"
        )


def window_refusals(head: Any, readers: bool) -> list[str]:
    """Why a format cannot hold a head's windows; [] if it has none, or the format's readers have them."""
    if readers or head.sliding_window is None:
        return []
    return [f"its layers have windows of {head.sliding_window} positions, which its readers do not have"]


# --- Which slots of a block see which ---


def read_causal(files: Files, config: dict[str, Any], given: dict[str, bool]) -> dict[str, Any]:
    """The head options that say so. given: what the config says of all layers, by key.

    Without any, slots attend only to earlier ones in layers that layer_types gives a window, else both ways."""
    kinds = config.get("layer_types")
    if given or not isinstance(kinds, list) or SLIDING not in kinds:
        return {"causal": agreed(files, given)}
    return {"causal": False, "causal_windows": True}


def slots_causal(head: ParallelConfig) -> bool | None:
    """Do slots attend only to earlier ones? True or False for every layer alike; None if layers differ."""
    found = {*head.causal_layers}
    return found.pop() if len(found) == 1 else None


def causal_refusals(head: ParallelConfig, readers: Collection[bool | None]) -> list[str]:
    """Why a format cannot hold the windows of a head that drafts a block. readers: the values of `slots_causal` that
    they can be told, or () if they have no windows."""
    if head.sliding_window is None or not readers:
        return window_refusals(head, bool(readers))
    causal = slots_causal(head)
    if causal is None and head.causal:
        return ["its slots attend only to earlier ones in layers without a window alone, which no config can say"]
    if causal in readers:
        return []
    said = {True: "only to earlier ones", False: "both ways", None: "only to earlier ones in layers with windows alone"}
    return [f"its slots attend {said[causal]}, which its readers cannot be told of a head with windows"]
