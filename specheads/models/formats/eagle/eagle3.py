"""EAGLE-3 as the EAGLE repository writes it, and SpecForge, vLLM, SGLang, TensorRT-LLM and llama.cpp read it.

The programs share the tensors and most of the config. They differ in how they number layers (layer_ids.py), in which
decoders they support beyond one plain block, and in the serving command.

Options other than sizes are at the config's top level and in ModelOpt's table eagle_config. From the code of vLLM 0.32,
SGLang 0.5.23 and TensorRT-LLM (main, 00679c66): all three read fc_norm and norm_output at the top level; only vLLM
reads norm_before_residual there. All read norm_before_fc in the table, and all but TensorRT-LLM also at the top level.
Only TensorRT-LLM reads return_hidden_post_norm (norm_output) in the table. The other options are ModelOpt's:
keys/without_effect.py has their values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import Eagle3Config
from specheads.models.formats.eagle import latent, peagle, transformers4
from specheads.models.formats.eagle.eagle3_parts import (
    BLOCKS,
    INSIDE,
    NORMS,
    QWEN3,
    computed_tensors,
    qwen3_bias_refusals,
    read_options,
    tensor_names,
    translate_shared,
)
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format
from specheads.models.formats.keys.config_table import architectures
from specheads.models.formats.parts import layer_ids
from specheads.models.formats.parts.decoder import act_refusals, block_config
from specheads.models.formats.parts.layer_ids import TABLE
from specheads.models.formats.parts.positions import EVERY, LINEAR, SGLANG, USUAL, Positions
from specheads.models.formats.parts.windows import window_refusals
from specheads.models.formats.serving import OLDER, OPENVINO_EAGLE3, TRTLLM, llamacpp, trtllm_yaml, vllm

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SERVED_NORMS = ("norm_before_fc", "norm_features", "norm_output")  # the NORMS that SGLang and TensorRT-LLM support


def _retrain(norms: Sequence[str]) -> str:
    """The recipe options that train a head without these norms."""
    return f"train one without: recipes/eagle3.yaml with {' '.join(f'head.{name}=false' for name in norms)}"


@dataclass(frozen=True)
class Eagle3(Format):
    """takes_layers: supports several decoder blocks, named as here. takes_biases: supports biases in the block.
    takes_taps: can read layers other than the usual three. needs_three_taps: must read exactly three layers. last: the
    families of which its readers capture the last layer's output before the final norm; None: of all. norms: the
    supported options that move a norm. takes_windows: supports sliding windows. positions: the scaled rotary positions
    it supports. masked: is for heads that draft all depths in one pass (P-EAGLE), and for no others."""

    kind: ClassVar[str] = Eagle3Config.kind
    config_keys: ClassVar[tuple[str, ...]] = ("draft_vocab_size",)
    classes: ClassVar[str] = rf"\w*Llama\w*|\w*Deep[Ss]eek\w*|{QWEN3}|{peagle.CLASS}"
    ignored: ClassVar[frozenset[str]] = latent.WITHOUT_EFFECT
    engine: str
    title: str
    versions: str
    serving: str
    embeds: bool | None = False
    takes_layers: bool = False
    takes_biases: bool = False
    takes_taps: bool = True
    needs_three_taps: bool = False
    last: Collection[str] | None = ()
    norms: Collection[str] = ()
    takes_windows: bool = False
    positions: Positions = USUAL
    masked: bool = False

    def recognises(self, files: Files) -> bool:
        config = files.config
        named = "draft_vocab_size" in config or any("Eagle3" in n or n == peagle.CLASS for n in architectures(config))
        return self.engine == "eagle" and (
            named or any(f"{first}hidden_norm.weight" in files.names for first in BLOCKS)
        )

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config
        return read_options(files, config, config, base)

    def names(self, head: Eagle3Config, stored: Collection[str] = ()) -> dict[str, str]:
        return tensor_names(head, "midlayer.", stored)

    def translate(self, files: Files, head: Eagle3Config, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        return translate_shared(files, head, base, files.config)

    def refusals(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert head.taps
        wrong = [peagle.refusal_reason(head, self.masked), layer_ids.refusal_reason(head.taps, base, self.last)]
        if head.num_layers > 1 and not self.takes_layers:
            wrong.append(f"it has {head.num_layers} decoder layers, which its readers norm differently or do not read")
        if (head.attention_bias or head.mlp_bias) and not self.takes_biases:
            wrong.append("its decoder has biases, which are dropped")
        if norms := [ours for ours in NORMS.values() if getattr(head, ours) and ours not in self.norms]:
            wrong.append(f"it has {' and '.join(norms)}, which its readers do not have; {_retrain(norms)}")
        if not self.takes_taps and head.taps != (usual := layer_ids.usual_taps(base)):
            wrong.append(f"it reads hidden_states {list(head.taps)}, and {list(usual)} are hard-coded")
        if not any(wrong) and self.engine in ("sglang", "modelopt"):
            wrong.append(layer_ids.nested_refusal(head.taps, base))
        if self.needs_three_taps and len(head.taps) != 3:
            wrong.append(f"it reads {len(head.taps)} layers, and its readers take 3")
        if self.engine == "llamacpp":
            wrong += layer_ids.llamacpp_refusals(base)
        if head.qk_norm and self.engine != "vllm":
            wrong.append(
                "its blocks are Qwen3's, with norms on queries and keys (qk_norm), and its readers' are Llama's"
            )
        if head.own_embeddings and self.engine != "vllm":
            wrong.append("it has embeddings of its own (own_embeddings), and its readers take the target's")
        wrong += qwen3_bias_refusals(head) + act_refusals(head) + latent.refusals(head, self.engine)
        wrong += self.positions.refusals(head) + window_refusals(head, self.takes_windows)
        return [reason for reason in wrong if reason]

    def config(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        assert head.taps
        top, inner = layer_ids.named_ids(head.taps, base)
        norms = {theirs: ours for theirs, ours in NORMS.items() if getattr(head, ours)}
        config = {
            "architectures": [ARCHITECTURE], "draft_vocab_size": head.draft_vocab_size,
            **block_config(head, tensors, base), **top, **dict.fromkeys(norms, True),
        }  # fmt: skip
        if head.own_embeddings:
            config["embed_requires_grad"] = True
        if self.masked:
            config |= {"parallel_drafting": True, peagle.TOKENS[0]: head.mask_token_id}
        if head.qk_norm:
            config |= {"architectures": [QWEN3], "model_type": "qwen3", "attention_bias": head.attention_bias}
        if head.kv_lora_rank is not None:
            config |= latent.config_keys(head)
        if self.engine == "trtllm":
            inner |= {theirs: True for theirs, ours in INSIDE.items() if ours in norms.values()}
        if inner:
            config[TABLE] = inner
        if len(head.taps) != 3:
            config["num_aux_hidden_states"] = len(head.taps)
        return config

    def rename(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        return super().rename(head, tensors, base) | computed_tensors(head, tensors)

    def texts(self, head: Eagle3Config, base: PreTrainedModel) -> dict[str, str]:
        if self.engine == "eagle":
            return transformers4.rewrite_base(base)
        if self.engine not in ("trtllm", "modelopt"):
            return {}
        assert head.taps
        layers = [f"eagle3_layers_to_capture: {layer_ids.output_ids(head.taps, base)}"]
        usual = head.taps == layer_ids.usual_taps(base)
        return {TRTLLM: trtllm_yaml("Eagle3", head.draft_depth, *([] if usual else layers))}


@dataclass(frozen=True)
class ModelOpt(Eagle3):
    """As ModelOpt exports it: layers numbered by their outputs, no t2d, no embeddings.

    The decoder block is named "layers.0." when exported from a Hugging Face model, and "midlayer." from Megatron, or
    "midlayer.0." if there are several. All are read; "layers.0." is written.
    """

    engine: str = "modelopt"
    title: str = "ModelOpt's EAGLE-3 export"
    versions: str = "nvidia-modelopt 0.47, as TensorRT-LLM reads it"
    embeds: bool | None = None
    serving: str = """\
```bash
trtllm-serve $base_arg --backend pytorch --extra_llm_api_options $folder_arg/trtllm.yml
```

If the layers are not the usual ones, `trtllm.yml` names them: TensorRT-LLM reads them only there. ModelOpt does not
load its own exports; this format is for programs that do.
"""

    def recognises(self, files: Files) -> bool:
        inner = files.config.get("eagle_config")
        return isinstance(inner, dict) and "use_input_layernorm_in_first_layer" in inner

    def names(self, head: Eagle3Config, stored: Collection[str] = ()) -> dict[str, str]:
        return tensor_names(head, "layers.0.", stored)

    def config(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        assert head.taps
        inner = {
            layer_ids.KEY: layer_ids.nested_list(head.taps, base), "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True,
        }  # fmt: skip
        config = {
            "architectures": [ARCHITECTURE], "draft_vocab_size": head.draft_vocab_size,
            **block_config(head, tensors, base), "attention_bias": False, "mlp_bias": False, "eagle_config": inner,
        }  # fmt: skip
        return config if len(head.taps) == 3 else config | {"num_aux_hidden_states": len(head.taps)}

    def rename(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        return {name: t for name, t in super().rename(head, tensors, base).items() if name != "t2d"}


FORMATS = (
    ModelOpt(),
    Eagle3(
        "eagle", "EAGLE-3 (the EAGLE repository's form, which SpecForge and the servers share)",
        "SafeAILab/EAGLE (main, transformers 4.53); run with OpenVINO GenAI 2026.4, given its layers", f"""\
```python
from eagle.model.ea_model import EaModel

model = EaModel.from_pretrained(use_eagle3=True, base_model_path="$base", ea_model_path="$folder")
```
{OLDER}
{OPENVINO_EAGLE3}""",
        takes_taps=False, positions=LINEAR,
    ),
    Eagle3(
        "vllm", "EAGLE-3 for vLLM", "vLLM 0.28 to 0.33, and run with 0.32", vllm("eagle3"),
        takes_layers=True, takes_biases=True, last=None, norms=tuple(NORMS.values()), takes_windows=True,
        positions=EVERY,
    ),
    Eagle3(
        "vllm", "P-EAGLE for vLLM", "vLLM 0.33, read only", vllm("eagle3", parallel=True), takes_layers=True,
        takes_biases=True, last=None, norms=tuple(NORMS.values()), takes_windows=True, positions=EVERY, masked=True,
    ),
    Eagle3(
        "sglang", "EAGLE-3 for SGLang", "SGLang 0.5.23", """\
```bash
python -m sglang.launch_server --model-path $base_arg --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path $folder_arg --speculative-num-steps $depth \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens $nodes
```

SGLang has the window of an EAGLE-3 head on its command line alone, and counts the positions before the token: if
config.json has a `sliding_window` of w, add `--speculative-draft-window-size` w − 1.
""",
        last=layer_ids.SGLANG_LAST, norms=_SERVED_NORMS, takes_windows=True, positions=SGLANG,
    ),
    Eagle3(
        "trtllm", "EAGLE-3 for TensorRT-LLM", "TensorRT-LLM with the PyTorch backend (main, 00679c66)", """\
```bash
trtllm-serve $base_arg --backend pytorch --extra_llm_api_options $folder_arg/trtllm.yml
```

If the layers are not the usual ones, `trtllm.yml` names them: TensorRT-LLM reads them only there.
""",
        norms=_SERVED_NORMS,
    ),
    Eagle3(
        "llamacpp", "EAGLE-3 for llama.cpp", "llama.cpp b11434 and b11549", llamacpp("eagle3"),
        norms=("norm_before_residual", "norm_before_fc"), needs_three_taps=True, last=layer_ids.LLAMACPP_LAST,
    ),
)  # fmt: skip
