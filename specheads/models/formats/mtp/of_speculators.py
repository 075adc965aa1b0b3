"""An MTP module in a file of its own, as speculators 0.9 extracts it from a Qwen model or trains it: read only.

Servers read modules in the model's own checkpoint, which is where `--to mtp` writes them.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import MtpConfig
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format
from specheads.models.formats.mtp.shipped import Shipped


class SpeculatorsMtp(Shipped):
    engine, title = "speculators", "speculators MTP"
    versions, serving = "speculators 0.9.0", ""
    within_base = False
    classes = r"MTP\w*"

    def recognises(self, files: Files) -> bool:
        return files.config.get("speculators_model_type") == "mtp"

    def ignores(self, path: tuple[str, ...]) -> bool:
        """The nested config is the target's, and the base's own is used; the rest of the modules' is in the tensors."""
        return path[0] in ("transformer_layer_config", "speculators_config") or super().ignores(path)

    def base_of(self, files: Files) -> str | None:
        return Format.base_of(self, files)

    def part_of(self, files: Files) -> Files:
        return files

    def refusals(self, head: MtpConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        return ["no server reads a module apart from its model: export it to mtp, into the model's own files"]


FORMATS: list[Format] = [SpeculatorsMtp()]
