"""DSpark as DeepSpec writes it and vLLM, SGLang and llama.cpp read it: DeepSpec's keys in a Qwen3 config.

DeepSpec's own files contain copies of the base's matrices; the other programs use those of the target. SpecForge has
the layers and the mask token in DFlash's table, and the other keys in that table or at the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks import forms, parallel
from specheads.models.formats.files import Files
from specheads.models.formats.format import output_matrix
from specheads.models.formats.keys.config_table import architectures, flag, table, whole
from specheads.models.formats.parts import layer_ids
from specheads.models.formats.parts.positions import GGUF, SGLANG
from specheads.models.formats.parts.windows import ANY_CAUSAL, read_causal
from specheads.models.formats.serving import llamacpp, vllm_gpu
from specheads.options import shown

ARCHITECTURE, SPECFORGE = "Qwen3DSparkModel", "DSparkDraftModel"
_LAYERS, _TABLE = "target_layer_ids", "dflash_config"
_EITHER = (
    _LAYERS, "mask_token_id", "block_size", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "sample_from_anchor", "is_causal", "causal",
)  # fmt: skip


@dataclass(frozen=True)
class DeepSpec(parallel.Parallel):
    """copies_output: the file contains the base's output matrix as well as its embeddings."""

    config_keys: ClassVar[tuple[str, ...]] = ("markov_rank",)
    copies_output: bool = False
    takes: tuple[str, ...] = forms.DSPARK_TYPES
    from_anchor: bool | None = True

    def recognises(self, files: Files) -> bool:
        config = files.config
        named = any("DSpark" in name for name in architectures(config))
        return self.copies_output and "speculators_model_type" not in config and (named or "markov_rank" in config)

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config
        if (classes := architectures(config)) not in ([ARCHITECTURE], [SPECFORGE]):
            raise CheckpointError(
                f"{files} is a DSpark head of the class {shown(classes)}; {ARCHITECTURE} and {SPECFORGE} are read here"
            )
        values = _either(files, config, table(config, _TABLE))
        options = parallel.read_options(
            files, config, config, base, layer_ids.read_output_ids(files, values, _LAYERS, base),
            whole(values, "mask_token_id", least=0), whole(values, "block_size"),
        )  # fmt: skip
        causal = {name: flag(values, name) for name in ("is_causal", "causal") if values[name] is not None}
        return {**options, **read_causal(files, config, causal), **forms.read_dspark_options(files, values)}

    def config(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        return {
            **parallel.qwen3_config(ARCHITECTURE, head, tensors, base), "mask_token_id": head.mask_token_id,
            _LAYERS: layer_ids.output_ids(head.taps or (), base), "num_anchors": head.anchors,
            "sample_from_anchor": True, **forms.dspark_keys(head),
        }  # fmt: skip

    def rename(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        named = super().rename(head, tensors, base)
        if self.copies_output:
            named["lm_head.weight"] = output_matrix(self.title, base).to(tensors["fc.weight"].dtype)
        return named


def _either(files: Files, config: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys in _EITHER, at the top or in the table. CheckpointError if the two contradict each other,
    or the table is another head's."""
    either = {}
    for name in _EITHER:
        values = [value for value in (config.get(name), inner.get(name)) if value is not None]
        if values[1:] and values[0] != values[1]:
            raise CheckpointError(
                f"{files}: its config says {name}={shown(values[0])}, and {_TABLE}.{name}={shown(values[1])}; its "
                "readers would disagree"
            )
        either[name] = values[0] if values else None
    for name, known in (("projector_type", ("dspark",)), ("attention_mode", ("gqa", "mha"))):
        if (value := inner.get(name, known[0])) not in known:
            raise CheckpointError(f"{files}: its config says {_TABLE}.{name}={shown(value)}; expected {known[0]}")
    return either


FORMATS = (
    DeepSpec(
        "deepspec", "DSpark in DeepSpec's format", "deepseek-ai/DeepSpec (main), vLLM 0.32", vllm_gpu("dspark"),
        embeds=True, copies_output=True,
    ),
    DeepSpec(
        "vllm", "DSpark for vLLM", "vLLM 0.32 and 0.33", vllm_gpu("dspark"), takes_draft_vocabulary=True,
            needs_markov=True, last=None, takes=("vanilla",), takes_windows=ANY_CAUSAL,
    ),
    DeepSpec(
        "sglang", "DSpark for SGLang", "SGLang 0.5.23 and later sources", """\
```bash
python -m sglang.launch_server --model-path $base_arg --speculative-algorithm DSPARK \\
  --speculative-draft-model-path $folder_arg --speculative-dspark-block-size $depth
```
""",
        needs_markov=True, positions=SGLANG, takes_windows=ANY_CAUSAL, last=layer_ids.SGLANG_LAST_OF_BLOCKS,
    ),
    DeepSpec(
        "llamacpp", "DSpark for llama.cpp", "llama.cpp b11549, and run with it", llamacpp("dspark"),
        takes_draft_vocabulary=True, needs_markov=True, takes_biases=False, positions=GGUF, takes=("vanilla",),
        last=layer_ids.LLAMACPP_LAST_OF_BLOCKS,
    ),
)  # fmt: skip
