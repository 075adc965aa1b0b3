"""Which layers of the target an EAGLE-3 or parallel head reads, as each consumer numbers them.

We use Hugging Face's hidden_states: hs[0] the embeddings, hs[i] the input of layer i. EAGLE-3 has three conventions:
  top level   eagle_aux_hidden_state_layer_ids: i is hs[i]       vLLM, speculators, llama.cpp
  nested      in eagle_config, under the same name: i is hs[i+1] SGLang, SpecForge, ModelOpt
  argument    eagle3_layers_to_capture: i is hs[i+1]             TensorRT-LLM
Without such a key, all of them and the EAGLE repository read hs[2], hs[n // 2], hs[n − 3] of n layers; OpenVINO GenAI
reads hs[3], hs[n // 2 + 1], hs[n − 2], unless hidden_layers_list in its converted model names others (i is hs[i+1]).
Parallel heads have two conventions, and always name their layers:
  top level   aux_hidden_state_layer_ids: i is hs[i]             speculators, vLLM for what speculators wrote
  outputs     target_layer_ids, in dflash_config or at the top: i is hs[i+1]  z-lab, JetSpec, DeepSpec, ModelOpt, vLLM
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads.models.files import CheckpointError
from specheads.models.formats.config_values import table, wholes
from specheads.models.formats.files import Files

KEY = "eagle_aux_hidden_state_layer_ids"


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """The hidden_states that every consumer reads by default."""
    return 2, num_layers // 2, num_layers - 3


def read_taps(files: Files, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The hidden_states that the config names. CheckpointError if its two keys disagree or a layer does not exist."""
    top, nested = wholes(config, KEY), wholes(table(config, "eagle_config"), KEY)
    found = {ids for ids in (top or None, nested and tuple(i + 1 for i in nested)) if ids}
    if len(found) > 1:
        inner = [i + 1 for i in nested or ()]
        raise CheckpointError(
            f"{files}: {KEY} says hidden_states {list(top or ())}, and eagle_config.{KEY} {inner} (one more than it "
            "numbers them); consumers would read different layers"
        )
    taps = found.pop() if found else usual_taps(num_layers)
    if wrong := refusal_reason(taps, num_layers):
        raise CheckpointError(f"{files}: {wrong}")
    return taps


def refusal_reason(taps: Sequence[int], num_layers: int) -> str:
    """Why no consumer can read these layers; "" if some can."""
    if list(taps) != sorted(set(taps)):
        return f"the layers read, hidden_states {list(taps)}, are not in ascending order, in which servers collect them"
    if outside := [tap for tap in taps if not 0 < tap < num_layers]:
        return (
            f"it reads hidden_states {outside}, and servers capture only those between two layers: 1 to "
            f"{num_layers - 1} of a base with {num_layers} layers"
        )
    return ""


def top_level_ids(taps: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """The key for vLLM, speculators and llama.cpp; {} for the usual layers."""
    return {} if taps == usual_taps(num_layers) else {KEY: list(taps)}


def nested_ids(taps: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """The key in eagle_config for SGLang, SpecForge and ModelOpt; {} for the usual layers."""
    return {} if taps == usual_taps(num_layers) else {KEY: [tap - 1 for tap in taps]}


def output_ids(taps: tuple[int, ...]) -> list[int]:
    """Layers by their outputs, as in TensorRT-LLM's eagle3_layers_to_capture and DFlash's target_layer_ids."""
    return [tap - 1 for tap in taps]


def read_output_ids(files: Files, config: dict[str, Any], key: str) -> tuple[int, ...]:
    """The hidden_states that a config names by layer outputs. CheckpointError if it names none."""
    if not (ids := wholes(config, key)):
        raise CheckpointError(f"{files}: its config has no {key}, the layers of the target that it reads")
    return tuple(i + 1 for i in ids)
