"""EAGLE-3 as ModelOpt exports it: layers numbered by their outputs, no t2d, no embeddings.

The decoder block is named "layers.0." when exported from a Hugging Face model, and "midlayer." from Megatron, or
"midlayer.0." if there are several. All are read; "layers.0." is written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import Eagle3Config
from specheads.models.formats.eagle import eagle3
from specheads.models.formats.files import Files
from specheads.models.formats.parts import layer_ids
from specheads.models.formats.parts.decoder import block_config


@dataclass(frozen=True)
class ModelOpt(eagle3.Eagle3):
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

    def names(self, head: Eagle3Config, found: Collection[str] = ()) -> dict[str, str]:
        return eagle3.tensor_names(head, "layers.0.", found)

    def config(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        assert head.taps
        inner = {
            layer_ids.KEY: layer_ids.nested_list(head.taps, base), "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True,
        }  # fmt: skip
        config = {
            "architectures": [eagle3.ARCHITECTURE], "draft_vocab_size": head.draft_vocab_size,
            **block_config(head, tensors, base), "attention_bias": False, "mlp_bias": False, "eagle_config": inner,
        }  # fmt: skip
        return config if len(head.taps) == 3 else config | {"num_aux_hidden_states": len(head.taps)}

    def rename(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        return {name: t for name, t in super().rename(head, tensors, base).items() if name != "t2d"}


FORMATS = (ModelOpt(),)
