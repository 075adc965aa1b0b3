"""DFlash in the `speculators` format: a block drafted in one pass, in which each slot predicts its own position."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import HeadConfig, ParallelConfig
from specheads.models.formats.blocks import parallel
from specheads.models.formats.blocks.dspark import nested_config, nested_options
from specheads.models.formats.config_values import flag
from specheads.models.formats.eagle.speculators import VERSION
from specheads.models.formats.files import Files
from specheads.models.formats.format import ExportFiles
from specheads.models.formats.parts import vocabulary
from specheads.models.formats.serving import HUB_ID, WHOLE_BLOCK, vllm


@dataclass(frozen=True)
class SpeculatorsDFlash(parallel.Parallel):
    """Heads with sample_from_anchor are read too, but written as DSpark: vLLM supports them under no other method."""

    classes: ClassVar[str] = r"DFlash(Draft|Speculator)\w*"
    engine: str = "speculators"
    title: str = "speculators DFlash"
    versions: str = f"speculators {VERSION}, vLLM 0.32 and 0.33"
    serving: str = vllm("dflash", f"{WHOLE_BLOCK}\n{HUB_ID}")
    takes_draft_vocabulary: bool = True
    last: Collection[str] | None = None
    from_anchor: bool | None = False

    def recognises(self, files: Files) -> bool:
        return (files.config or {}).get("speculators_model_type") == "dflash"

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        from_anchor = flag(files.config or {}, "sample_from_anchor")
        return {**nested_options(files, base), "sample_from_anchor": from_anchor}

    def write(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        assert isinstance(head, ParallelConfig)
        named = {theirs: tensors[ours] for ours, theirs in self.names(head).items()}
        config = nested_config("dflash", "DFlash", head, tensors, base, {})
        return ExportFiles(config, named | vocabulary.offsets(tensors))


FORMATS = (SpeculatorsDFlash(),)
