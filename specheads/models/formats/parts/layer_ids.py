"""Which layers of the target an EAGLE-3 or parallel head reads, as each program numbers them.

A boundary is a state between layers: 0 the embeddings, i the input of layer i, n the last of n layers' output before
the final norm. Our taps are Hugging Face's hidden_states, which are the boundaries up to n − 1; hidden_states[n] is the
norm's output, which no server captures, and n + 1 is boundary n (decoding/verify/taps.py).

EAGLE-3, from the code of vLLM 0.32, SGLang 0.5.23 and llama.cpp b11434:
  top level   eagle_aux_hidden_state_layer_ids: boundaries   vLLM, speculators, llama.cpp
  nested      in eagle_config, under the same name           SGLang, SpecForge, ModelOpt: the layer whose output it is,
              so one below the boundary; but SGLang takes    DeepSeek's and GLM-4.7-Flash's as boundaries unless the
              first id is 1 (deepseek_v2.py:3470, glm4_moe_lite.py:817), and gpt-oss's if the largest is n
              (gpt_oss.py:1350). vLLM without the key at the top: boundaries in its older runner, which CPUs have
              (gpu_model_runner.py:5279); its newer one does not read them (spec_decode/eagle/eagle3_utils.py:100).
  argument    eagle3_layers_to_capture: by outputs           TensorRT-LLM
Without such a key all of them and the EAGLE repository read boundaries 2, n // 2, n − 3, except that SGLang adds 1 for
MiniMax-M3's vision class (minimax_m3_vl.py:265), and OpenVINO GenAI for all, unless hidden_layers_list in its converted
model names others, by outputs.
Parallel heads always name their layers, for every family alike:
  top level   aux_hidden_state_layer_ids: boundaries         speculators, vLLM for what speculators wrote
  outputs     target_layer_ids, in dflash_config or at the top: by outputs    z-lab, JetSpec, DeepSpec, ModelOpt, vLLM
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from specheads.decoding.verify.hf_base import layer_count, text_config
from specheads.decoding.verify.taps import last_output
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import table, wholes

logger = logging.get_logger(__name__)

KEY, TABLE = "eagle_aux_hidden_state_layer_ids", "eagle_config"
# Families, as model_type, of which SGLang numbers the layers of an EAGLE-3 head in a way of their own.
_FIRST_IS_ONE = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_k25", "glm4_moe_lite",
}  # fmt: skip
_LARGEST_IS_LAST = {"gpt_oss"}
_USUAL_PLUS_ONE = {"minimax_m3_vl"}
# Families whose boundary n the programs capture: for EAGLE-3, and for parallel heads.
SGLANG_LAST = ("gpt_oss", "gemma4", "gemma4_text", "minimax_m3_vl")
SGLANG_LAST_OF_BLOCKS = (*SGLANG_LAST, "laguna", "lfm2", "lfm2_moe", "nemotron_h")
LLAMACPP_LAST = ("gpt_oss",)  # of others it would give the norm's output
LLAMACPP_LAST_OF_BLOCKS = ("deepseek_v4", "mimo_v2_flash", "nemotron_h")
# Families of which llama.cpp hands out the layers' inputs, by model_type of the language model in transformers. For any
# other its server ends at the first request with "layer input tensor is null". From llama.cpp b11434: the sources in
# src/models that set t_layer_inp, and the models that are built by them. bailing_moe_v3, nanbeige and qwen4exp have no
# class in transformers.
LLAMACPP = "b11434"
LLAMACPP_FAMILIES = (
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v4", "gemma4", "gemma4_text", "gemma4_unified_text", "gpt_oss",
    "hunyuan_v1_dense", "hunyuan_vl_text", "lfm2", "lfm2_moe", "llama", "mimo_v2_flash", "minimax", "minimax_m2",
    "mistral", "mixtral", "muse_glimmer_text", "nanbeige", "nemotron_h", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
)  # fmt: skip


def families(base: PreTrainedModel) -> set[str]:
    """The model_type of a base and of its language model."""
    return {str(config.model_type) for config in (base.config, text_config(base))}


def usual_taps(base: PreTrainedModel) -> tuple[int, int, int]:
    """The hidden_states that a consumer reads by default."""
    layers = layer_count(text_config(base))
    return 2, layers // 2, layers - 3


def boundaries(taps: Iterable[int], base: PreTrainedModel) -> list[int]:
    last = last_output(text_config(base))
    return [tap - 1 if tap == last else tap for tap in taps]


def taps_at(ids: Iterable[int], base: PreTrainedModel) -> tuple[int, ...]:
    """Boundaries → taps."""
    layers = layer_count(text_config(base))
    return tuple(i + (i >= layers) for i in ids)


def sglang_boundaries(ids: Sequence[int] | None, base: PreTrainedModel) -> list[int]:
    """The boundaries that SGLang reads for the nested ids; None: there are none."""
    family = families(base)
    if not ids:
        return [tap + bool(family & _USUAL_PLUS_ONE) for tap in usual_taps(base)]
    as_they_are = (family & _FIRST_IS_ONE and ids[0] != 1) or (
        family & _LARGEST_IS_LAST and max(ids) == layer_count(text_config(base))
    )
    return list(ids) if as_they_are else [i + 1 for i in ids]


def read_taps(files: Files, config: dict[str, Any], base: PreTrainedModel) -> tuple[int, ...]:
    """The taps that the config names. CheckpointError if its two keys disagree or a layer does not exist."""
    top, nested = wholes(config, KEY), wholes(table(config, TABLE), KEY)
    outer, inner = list(top or usual_taps(base)), sglang_boundaries(nested, base)
    if nested:
        if top and outer != inner:
            raise CheckpointError(
                f"{files}: {KEY} says hidden_states {outer}, and {TABLE}.{KEY} {inner} (as SGLang counts them); "
                "consumers would read different layers"
            )
        if inner != list(nested) and not top:
            logger.warning(
                "%s names its layers only in %s, as %s: read as hidden_states %s, as SGLang does; vLLM 0.32 reads %s "
                "on a CPU, and the usual layers on a GPU. An export to vllm names them as they are read here.",
                files, TABLE, list(nested), inner, list(nested),
            )  # fmt: skip
        outer = inner
    return readable(files, taps_at(outer, base), base)


def readable(files: Files, taps: tuple[int, ...], base: PreTrainedModel) -> tuple[int, ...]:
    """The taps of a file. CheckpointError if no consumer can read them."""
    if wrong := refusal_reason(taps, base):
        raise CheckpointError(f"{files}: {wrong}")
    return taps


def refusal_reason(taps: Sequence[int], base: PreTrainedModel, last: Collection[str] | None = None) -> str:
    """Why no consumer can read these taps; "" if some can. last: the families of which it captures the last boundary;
    None: of all."""
    layers, family = layer_count(text_config(base)), families(base)
    if list(taps) != sorted(set(taps)):
        return f"the layers read, hidden_states {list(taps)}, are not in ascending order, in which servers collect them"
    if outside := [tap for tap in taps if not (0 < tap < layers or tap == layers + 1)]:
        return (
            f"it reads hidden_states {outside}, and servers capture only those between two layers: 1 to "
            f"{layers - 1} of a base with {layers} layers, and at most the last layer's output before the final norm "
            f"({layers + 1} here)"
        )
    if layers + 1 in taps and last is not None and not family & set(last):
        of = f" but of {', '.join(last)}, not of {' or '.join(sorted(family))}" if last else ""
        return f"it reads the last layer's output before the final norm (tap {layers + 1}), not captured there{of}"
    return ""


def nested_refusal(taps: Sequence[int], base: PreTrainedModel) -> str:
    """Why no ids in eagle_config make SGLang read these taps; "" if some do."""
    if nested_list(taps, base) is None:
        return (
            f"it reads hidden_states {list(taps)}, and SGLang cannot be told of the first: it adds 1 to the ids of "
            f"{' or '.join(sorted(families(base)))} if the first is 1"
        )
    return ""


def nested_list(taps: Sequence[int], base: PreTrainedModel) -> list[int] | None:
    """The ids in eagle_config with which SGLang reads these taps; None if none do."""
    wanted = boundaries(taps, base)
    ways = [i - 1 for i in wanted], wanted
    return next((ids for ids in ways if sglang_boundaries(ids, base) == wanted), None)


def named_ids(taps: tuple[int, ...], base: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key for the top level (vLLM, speculators, llama.cpp) and for eagle_config (SGLang, SpecForge). Both are {}
    for the layers that all read without; else both are there, as vLLM reads the second if it is alone."""
    ids = nested_list(taps, base)
    if taps == usual_taps(base) and boundaries(taps, base) == sglang_boundaries(None, base):
        return {}, {}
    return {KEY: boundaries(taps, base)}, {} if ids is None else {KEY: ids}


def output_ids(taps: tuple[int, ...], base: PreTrainedModel) -> list[int]:
    """Layers by their outputs, as in TensorRT-LLM's eagle3_layers_to_capture and DFlash's target_layer_ids."""
    return [i - 1 for i in boundaries(taps, base)]


def read_output_ids(files: Files, config: dict[str, Any], key: str, base: PreTrainedModel) -> tuple[int, ...]:
    """The taps that a config names by layer outputs. CheckpointError if it names none."""
    if not (ids := wholes(config, key)):
        raise CheckpointError(f"{files}: its config has no {key}, the layers of the target that it reads")
    return taps_at((i + 1 for i in ids), base)


def llamacpp_refusals(base: PreTrainedModel) -> list[str]:
    """The reason why llama.cpp cannot draft for this base; [] if it can."""
    family = families(base)
    if family & set(LLAMACPP_FAMILIES) and "mistral3" not in family:  # of a vision model llama.cpp builds another class
        return []
    return [
        f"llama.cpp {LLAMACPP} gives no layer inputs of {' or '.join(sorted(family))}, so its server would end at the "
        f"first request; it does for {', '.join(LLAMACPP_FAMILIES)}: serve the head by another program"
    ]
