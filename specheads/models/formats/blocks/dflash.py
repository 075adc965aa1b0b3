"""DFlash as published by z-lab and shared by vLLM, SGLang and ModelOpt; JetSpec is the same with causal slots.

The config is a Qwen3 model's with an added table, dflash_config. The head uses the base's embeddings and output matrix,
which are not in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks import mask, parallel
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import agreed, architectures, flag, table, whole
from specheads.models.formats.parts import layer_ids
from specheads.models.formats.parts.positions import GGUF, SGLANG, USUAL
from specheads.models.formats.parts.windows import ANY_CAUSAL, read_causal
from specheads.models.formats.serving import OPENVINO, SGLANG_BLOCK, TRTLLM, WHOLE_BLOCK, llamacpp, trtllm_yaml, vllm
from specheads.options import shown

ARCHITECTURE = "DFlashDraftModel"
_TABLE, _LAYERS = "dflash_config", "target_layer_ids"


@dataclass(frozen=True)
class DFlash(parallel.Parallel):
    config_keys: ClassVar[tuple[str, ...]] = (_TABLE,)
    classes: ClassVar[str] = ARCHITECTURE
    from_anchor: bool | None = False

    def recognises(self, files: Files) -> bool:
        config = files.config
        named = _TABLE in config or any(name.startswith("DFlash") for name in architectures(config))
        return (
            named and self.causal is not None and self.causal == agreed(files, _causal(config, table(config, _TABLE)))
        )

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config, inner = files.config, table(files.config, _TABLE)
        self._refuse_others(files, inner, text_config(base).hidden_size)
        options = parallel.read_options(
            files, config, config, base, layer_ids.read_output_ids(files, inner, _LAYERS, base),
            whole(inner, "mask_token_id", config.get("mask_token_id"), least=0), _block_size(files, config, inner),
        )  # fmt: skip
        own_mask = True if files.find(mask.FILE) is not None else None
        causal = read_causal(files, config, _causal(config, inner))
        return {**options, **causal, "own_mask": own_mask, "sample_from_anchor": False}

    def translate(
        self, files: Files, head: ParallelConfig, base: PreTrainedModel
    ) -> tuple[dict[str, Tensor], set[str]]:
        translated, consumed = super().translate(files, head, base)
        return translated | mask.read_mask(files, head), consumed

    def pickles(self, head: ParallelConfig, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return mask.written_mask(head, tensors)

    def config(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        # JetSpec reads causal_head. vLLM reads causal, whose default differs from layer to layer.
        causal = {"causal": head.causal} | ({"causal_head": True} if head.causal else {})
        if head.sliding_window is not None:  # is_causal says it for all layers, or nothing does
            causal = {}
        inner = {"mask_token_id": head.mask_token_id, _LAYERS: layer_ids.output_ids(head.taps or (), base), **causal}
        return {**parallel.qwen3_config(ARCHITECTURE, head, tensors, base), _TABLE: inner}

    def texts(self, head: ParallelConfig, base: PreTrainedModel) -> dict[str, str]:
        return {TRTLLM: trtllm_yaml("DFlash", head.num_drafted)} if self.engine == "trtllm" else {}

    @staticmethod
    def _refuse_others(files: Files, inner: dict[str, Any], hidden: int) -> None:
        """CheckpointError for a head of this family that heads here cannot represent."""
        if flag(inner, "sample_from_anchor"):
            raise CheckpointError(f"{files}: sample_from_anchor=true, which readers of this format do not accept")
        if (target := inner.get("target_hidden_size")) not in (None, hidden):
            raise CheckpointError(f"{files}: it reads features of {shown(target)} values (target_hidden_size)")


def _causal(config: dict[str, Any], inner: dict[str, Any]) -> dict[str, bool]:
    """Do slots attend only to earlier ones? By key, for whichever readers' keys the config has."""
    keys = ((config, "is_causal"), (inner, "causal"), (inner, "causal_head"))
    return {name: flag(section, name) for section, name in keys if section.get(name) is not None}


def _block_size(files: Files, config: dict[str, Any], inner: dict[str, Any]) -> int:
    """The number of slots in a block: at the config's top level in older heads, in dflash_config in newer ones."""
    sizes = {whole(table, "block_size") for table in (config, inner) if table.get("block_size") is not None}
    if len(sizes) != 1:
        claim = f"block_size={sorted(sizes)}" if sizes else "no block_size"
        raise CheckpointError(f"{files}: its config has {claim}; expected one")
    return sizes.pop()


FORMATS = (
    DFlash(
        "dflash", "DFlash (z-lab's format, which the servers share)", "z-lab's DFlash heads, vLLM 0.32, SGLang 0.5.23",
        f"{vllm('dflash', WHOLE_BLOCK)}\nBy SGLang:\n\n{SGLANG_BLOCK}", takes_windows=ANY_CAUSAL,
        last=layer_ids.SGLANG_LAST_OF_BLOCKS, takes_mask=True,
    ),
    DFlash(
        "jetspec", "JetSpec", "hao-ai-lab/JetSpec (main)", """\
```python
from jetspec import DraftHeadTreeDrafter, load_draft_head

head = load_draft_head("$folder")
drafter = DraftHeadTreeDrafter(
    head, target=engine.model, block_size=head.block_size, target_layer_ids=head.target_layer_ids
)
```

`engine` is JetSpec's engine for the base `$base`.
""",
        causal=True,
    ),
    DFlash(
        "vllm", "DFlash for vLLM", "vLLM 0.32 and 0.33", vllm("dflash", WHOLE_BLOCK), takes_draft_vocabulary=True,
        causal=None, last=None, takes_mask=True, takes_windows=ANY_CAUSAL,
    ),
    DFlash(
        "sglang", "DFlash for SGLang", "SGLang 0.5.23 and later sources", SGLANG_BLOCK, positions=SGLANG,
        takes_windows=ANY_CAUSAL, last=layer_ids.SGLANG_LAST_OF_BLOCKS, takes_mask=True,
    ),
    DFlash(
        "trtllm", "DFlash for TensorRT-LLM", "TensorRT-LLM (main) with the PyTorch backend", """\
```bash
trtllm-serve $base_arg --backend pytorch --extra_llm_api_options $folder_arg/trtllm.yml
```
""",
        positions=USUAL,
    ),
    DFlash(
        "llamacpp", "DFlash for llama.cpp", "llama.cpp b11549, and run with it", llamacpp("dflash"), takes_biases=False,
        positions=GGUF, takes_windows=(True, False), last=layer_ids.LLAMACPP_LAST_OF_BLOCKS,
    ),
    DFlash(
        "openvino", "DFlash for OpenVINO GenAI", "OpenVINO GenAI 2026.4 with optimum-intel 2.2", OPENVINO,
    ),
)  # fmt: skip
