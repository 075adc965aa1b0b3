"""Which states an EAGLE-3 head is fed, as each server's code finds them in a config: the rules restated one by one, for
a target of n layers and one family. A state is the input of that layer; n is the last layer's output before the norm.

SGLang 0.5.23 (set_eagle3_layers_to_capture of each model), vLLM 0.32 (both model runners), llama.cpp b11434 (its
converter and common/speculative.cpp), TensorRT-LLM (main, 00679c66).
"""

import json

NAME = "eagle_aux_hidden_state_layer_ids"


def usual(n):
    return [2, n // 2, n - 3]


def sglang(config, n, family):
    """None for a state that the model does not capture."""
    try:
        ids = config["eagle_config"][NAME]
    except KeyError:
        ids = None
    if family in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite"):
        if ids is None:
            capture = usual(n)
        elif ids and ids[0] == 1:
            capture = [val + 1 for val in ids]
        else:
            capture = list(ids)
    elif family == "gpt_oss":
        if ids is None:
            capture = usual(n)
        elif ids and max(ids) == n:
            capture = list(ids)
        else:
            capture = [val + 1 for val in ids]
    elif family == "minimax_m3_vl":
        capture = [val + 1 for val in (usual(n) if ids is None else ids)]
    else:
        capture = usual(n) if ids is None else [val + 1 for val in ids]
    last = n if family in ("gpt_oss", "gemma4_text", "minimax_m3_vl") else n - 1
    return [i if i <= last else None for i in capture]


def vllm_on_cpu(config, n, family):
    ids = config.get(NAME)
    if not ids:
        ids = config.get("eagle_config", {}).get(NAME)
    return list(ids) if ids else usual(n)


def vllm_on_gpu(config, n, family):
    return list(config.get(NAME) or usual(n))


def llamacpp(config, n, family):
    layers = config.get(NAME) or usual(n)
    last = n if family == "gpt_oss" else n - 1  # of other families the state at n is the norm's output, or none
    return [i if i <= last else None for i in layers]


def trtllm(text, n):
    """From the options file."""
    lines = [line.split(":")[1] for line in text.splitlines() if "eagle3_layers_to_capture" in line]
    return [i + 1 for i in json.loads(lines[0])] if lines else usual(n)
