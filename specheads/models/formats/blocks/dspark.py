"""DSpark in the `speculators` format: a block drafted in one pass from the target's features, plus a Markov bias.

Attention between slots is bidirectional. Each slot predicts the next position, or, as in DFlash, its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import HeadConfig, ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks import parallel
from specheads.models.formats.config_values import table, whole, wholes
from specheads.models.formats.eagle.speculators import VERSION, nested_block, speculators_config
from specheads.models.formats.files import Files
from specheads.models.formats.format import ExportFiles
from specheads.models.formats.parts import vocabulary
from specheads.models.formats.parts.layer_ids import boundaries, taps_at
from specheads.models.formats.serving import HUB_ID, vllm_gpu

_LAYERS = "aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DSpark(parallel.Parallel):
    classes: ClassVar[str] = r"DSpark\w*"
    engine: str = "speculators"
    title: str = "speculators DSpark"
    versions: str = f"speculators {VERSION}, vLLM 0.33"
    serving: str = f"{vllm_gpu('dspark')}\n{HUB_ID}\n"
    takes_markov: bool = True
    takes_draft_vocabulary: bool = True
    last: Collection[str] | None = None

    def recognises(self, files: Files) -> bool:
        return (files.config or {}).get("speculators_model_type") == "dspark"

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config or {}
        marks = parallel.read_dspark_options(files, config, markov_rank=256, confidence=True)
        return {**nested_options(files, base), **marks}

    def write(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        assert isinstance(head, ParallelConfig)
        marks = {
            "markov_rank": head.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": head.confidence,
            "confidence_head_with_markov": head.markov_rank > 0,
        }  # fmt: skip
        config = nested_config("dspark", "DSpark", head, tensors, base, marks)
        named = {theirs: tensors[ours] for ours, theirs in self.names(head).items()}
        return ExportFiles(config, named | vocabulary.offsets(tensors))


def nested_options(files: Files, base: PreTrainedModel) -> dict[str, Any]:
    """Options from a speculators config, which nests the decoder's config and numbers layers as hidden_states."""
    config = files.config or {}
    taps = wholes(config, _LAYERS)
    if not taps:
        raise CheckpointError(f"{files}: its config has no {_LAYERS}")
    return parallel.read_options(
        files, config, table(config, "transformer_layer_config"), base, taps_at(taps, base),
        whole(config, "mask_token_id", least=0), whole(config, "block_size", 8),
    )  # fmt: skip


def nested_config(
    kind: str, name: str, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel,
    more: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The speculators config of a parallel head. more: keys added for its kind."""
    assert head.taps
    return {
        "architectures": [f"{name}DraftModel"], "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "speculators_model_type": kind, "speculators_version": VERSION, "block_size": head.block_size,
        "draft_vocab_size": head.draft_vocab_size, "target_hidden_size": None, _LAYERS: boundaries(head.taps, base),
        "mask_token_id": head.mask_token_id,
        # Only matters for sliding layers, of which there are none; but vLLM 0.32 takes false as "all layers causal".
        "sliding_window_non_causal": True,
        "sample_from_anchor": head.sample_from_anchor, **more, "tie_word_embeddings": False,
        **nested_block(head, tensors, base, "qwen3"),
        "speculators_config": speculators_config(kind, head.num_drafted, base),
    }  # fmt: skip


FORMATS = (DSpark(),)
