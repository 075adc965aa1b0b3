"""Which families of targets llama.cpp can draft for with a head: those of which it hands out the layers' inputs.

For any other, its server ends at the first request with "layer input tensor is null". From llama.cpp b11434: the
sources in src/models that set t_layer_inp, and the models that are built by them.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from specheads.models.formats.parts.layer_ids import families

VERSION = "b11434"
# By model_type of the language model in transformers. bailing_moe_v3, nanbeige and qwen4exp have no class there.
FAMILIES = (
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v4", "gemma4", "gemma4_text", "gemma4_unified_text", "gpt_oss",
    "hunyuan_v1_dense", "hunyuan_vl_text", "lfm2", "lfm2_moe", "llama", "mimo_v2_flash", "minimax", "minimax_m2",
    "mistral", "mixtral", "muse_glimmer_text", "nanbeige", "nemotron_h", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
)  # fmt: skip


def refusals(base: PreTrainedModel) -> list[str]:
    """The reason why llama.cpp cannot draft for this base; [] if it can."""
    found = families(base)
    if found & set(FAMILIES) and "mistral3" not in found:  # of a vision model llama.cpp builds another class
        return []
    return [
        f"llama.cpp {VERSION} gives no layer inputs of {' or '.join(sorted(found))}, so its server would end at the "
        f"first request; it does for {', '.join(FAMILIES)}: serve the head by another program"
    ]
