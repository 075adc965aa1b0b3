"""EAGLE-1 and EAGLE-2 as the EAGLE repository, vLLM and SGLang read them.

The programs share the tensors but disagree on the bias of fc. The EAGLE repository has one unless "bias" is false. vLLM
silently drops it. SGLang always has one, left random if the file has none. So a head without a bias is always written
with "bias": false, and for SGLang also with a zero bias.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import EagleConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.eagle import transformers4
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, check_embeddings, count, embedding_scale
from specheads.models.formats.keys.config_table import flag, table
from specheads.models.formats.parts.decoder import act_refusals, block_config, block_names, block_options, zero_biases
from specheads.models.formats.parts.positions import EVERY, LINEAR, SGLANG, Positions
from specheads.models.formats.parts.windows import window_refusals
from specheads.models.formats.serving import OLDER, vllm

_FUSION, _TRANSFORMER = "fusion_fc", "transformer."  # of speculators


@dataclass(frozen=True)
class Eagle(Format):
    """architecture: the server's name for the class; fc_bias: supports a bias of fc; zeros: needs a zero bias if there
    is none; positions: the scaled rotary positions it supports."""

    kind: ClassVar[str] = EagleConfig.kind
    classes: ClassVar[str] = r"\w*Llama\w*|EagleSpeculator"
    ignored: ClassVar[frozenset[str]] = frozenset({"transformer_layer_architecture", "speculators_config"})
    engine: str
    title: str
    versions: str
    serving: str
    embeds: bool | None = True
    architecture: str = "LlamaForCausalLM"
    fc_bias: bool = True
    writes_fc_bias: bool = False
    takes_layers: bool = False
    takes_biases: bool = False
    positions: Positions = EVERY

    def recognises(self, files: Files) -> bool:
        known = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(files.names) or _of_speculators(files)
        return self.engine == "eagle" and known

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config
        if _of_speculators(files):
            return _speculators_options(files, base)
        if flag(config, "add_para_norm"):
            raise CheckpointError(
                f"{files}: its head has add_para_norm=true, norms on what fc reads (HASS), which heads here do not "
                "have yet"
            )
        options = block_options(files, config, base, count(files, "layers."))
        biased = flag(config, "bias", default=True)
        if not biased and "fc.bias" in files.shapes:
            size = options["hidden_size"]
            if files.shapes["fc.bias"].shape != (size,):
                raise CheckpointError(f"{files}: fc.bias is {tuple(files.shapes['fc.bias'].shape)}, not ({size},)")
            if files.tensor("fc.bias").any():
                raise CheckpointError(
                    f'{files}: its config says "bias": false and fc.bias is not zero, so SGLang would add it and '
                    'others not; write "bias": true, or take fc.bias away'
                )
        return {**options, "fc_bias": biased, "taps": (text_config(base).num_hidden_layers,)}

    def names(self, head: EagleConfig, stored: Collection[str] = ()) -> dict[str, str]:
        fc, prefix = (_FUSION, _TRANSFORMER) if f"{_FUSION}.weight" in stored else ("fc", "layers.{}.")
        names = {"fc.weight": f"{fc}.weight"} | ({"fc.bias": f"{fc}.bias"} if head.fc_bias else {})
        for i in range(head.num_layers):
            names |= block_names(head, i, prefix.format(i))
        return names

    def translate(self, files: Files, head: EagleConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        if "embed_tokens.weight" in files.shapes:
            check_embeddings(files, "embed_tokens.weight", base)
        assert head.hidden_size
        translated, size = zero_biases(files, files.config, head), head.hidden_size
        fc = self.names(head, files.names)["fc.weight"]
        fused = files.shapes.get(fc)
        if (scale := embedding_scale(base)) != 1 and fused is not None and fused.shape == (size, 2 * size):
            translated["fc.weight"] = _scaled(files.tensor(fc), size, 1 / scale)
        return translated, {"embed_tokens.weight", "fc.bias", *({fc} if "fc.weight" in translated else ())}

    def refusals(self, head: EagleConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert head.taps
        wrong, layers = list[str](), text_config(base).num_hidden_layers
        try:
            embedding_scale(base)
        except CheckpointError as error:
            wrong.append(str(error))
        if head.taps != (layers,):
            wrong.append(
                f"it reads hidden_states {head.taps[0]}, and EAGLE-1 reads the output of the final norm ({layers})"
            )
        if head.fc_bias and not self.fc_bias and tensors["fc.bias"].any():
            wrong.append("fc has a bias, which is dropped")
        if head.num_layers > 1 and not self.takes_layers:
            wrong.append(f"it has {head.num_layers} decoder layers, and only one is known to be read correctly")
        if (head.attention_bias or head.mlp_bias) and not self.takes_biases:
            wrong.append("its decoder has biases, which are dropped")
        if head.qk_norm:
            wrong.append("its blocks have norms on queries and keys (qk_norm), which its readers do not have")
        wrong += act_refusals(head) + window_refusals(head, readers=False)
        return wrong + self.positions.refusals(head)

    def config(self, head: EagleConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        # vLLM reads "bias" as that of attention; refusals() lets only a zero bias of fc get here.
        biased = head.fc_bias and self.fc_bias
        return {"architectures": [self.architecture], **block_config(head, tensors, base), "bias": biased}

    def rename(self, head: EagleConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        named = super().rename(head, tensors, base)
        if (scale := embedding_scale(base)) != 1:  # readers give fc the unscaled rows, while the base scales them
            named["fc.weight"] = _scaled(named["fc.weight"], len(named["fc.weight"]), scale)
        if self.writes_fc_bias and not head.fc_bias:
            named["fc.bias"] = torch.zeros(len(named["fc.weight"]), dtype=named["fc.weight"].dtype)
        return named

    def texts(self, head: EagleConfig, base: PreTrainedModel) -> dict[str, str]:
        return transformers4.rewrite_base(base) if self.engine == "eagle" else {}


def _of_speculators(files: Files) -> bool:
    return files.config.get("speculators_model_type") == "eagle"


def _speculators_options(files: Files, base: PreTrainedModel) -> dict[str, Any]:
    if flag(files.config, "layernorms"):
        raise CheckpointError(
            f"{files}: its head has layernorms=true, norms on the embedding, in the block and at the output, which "
            "EAGLE-1 heads here do not have; train one without them, with recipes/eagle.yaml"
        )
    options = block_options(files, table(files.config, "transformer_layer_config"), base, 1)
    return {
        **options, "fc_bias": flag(files.config, "fusion_bias"), "taps": (text_config(base).num_hidden_layers,),
    }  # fmt: skip


def _scaled(fused: Tensor, size: int, scale: float) -> Tensor:
    """fc.weight (H, 2H) with the first `size` columns, which read the embedding, multiplied by `scale`."""
    embedded, hidden = fused.split(size, dim=1)
    return torch.cat([(embedded.float() * scale).to(fused.dtype), hidden], dim=1)


FORMATS = (
    Eagle(
        "eagle", "EAGLE-1 (the EAGLE repository's form, which vLLM and SGLang share)",
        "SafeAILab/EAGLE (main, transformers 4.53)", f"""\
```python
from eagle.model.ea_model import EaModel

model = EaModel.from_pretrained(use_eagle3=False, base_model_path="$base", ea_model_path="$folder")
```
{OLDER}""",
        takes_layers=True, positions=LINEAR,
    ),
    Eagle(
        "vllm", "EAGLE-1 for vLLM", "vLLM 0.28 to 0.33, and run with 0.32", vllm("eagle"),
        fc_bias=False, takes_layers=True, takes_biases=True,
    ),
    Eagle(
        "sglang", "EAGLE-1 for SGLang", "SGLang 0.5.23", """\
```bash
python -m sglang.launch_server --model-path $base_arg --speculative-algorithm EAGLE \\
  --speculative-draft-model-path $folder_arg --speculative-num-steps $depth \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens $nodes
```
""",
        architecture="LlamaForCausalLMEagle", writes_fc_bias=True,
        positions=SGLANG,
    ),
)  # fmt: skip
