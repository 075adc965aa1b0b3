"""EAGLE-3 in the `speculators` format, which vLLM serves directly. Its config nests that of the decoder block."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import Eagle3Config, HeadConfig
from specheads.heads.config import DecoderConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.config_values import table
from specheads.models.formats.eagle import eagle3
from specheads.models.formats.files import Files
from specheads.models.formats.format import ExportFiles, Format
from specheads.models.formats.parts import vocabulary
from specheads.models.formats.parts.decoder import block_config
from specheads.models.formats.parts.layer_ids import KEY, boundaries
from specheads.models.formats.serving import HUB_ID, base_name, vllm
from specheads.options import shown

VERSION = "0.9.0"


@dataclass(frozen=True)
class Speculators(Format):
    kind: ClassVar[str] = Eagle3Config.kind
    config_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type",)
    classes: ClassVar[str] = r"Eagle3\w*"
    engine: str = "speculators"
    title: str = "speculators EAGLE-3"
    versions: str = f"speculators {VERSION}, vLLM 0.28 to 0.33"
    serving: str = vllm("eagle3", HUB_ID)
    embeds: bool | None = True

    def recognises(self, files: Files) -> bool:
        return "speculators_model_type" in (files.config or {})

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config or {}
        if (kind := config.get("speculators_model_type")) != "eagle3":
            raise CheckpointError(
                f"{files} is a speculators head of type {shown(kind)}; eagle3, dflash and dspark ones are read here"
            )
        if "norm_before_residual" not in config:
            raise CheckpointError(
                f"{files}: its config does not say norm_before_residual, which vLLM takes for true and others for "
                "false; write what it was trained with into config.json"
            )
        return eagle3.read_options(files, config, table(config, "transformer_layer_config"), base)

    def names(self, head: HeadConfig, found: Collection[str] = ()) -> dict[str, str]:
        assert isinstance(head, Eagle3Config)
        return eagle3.tensor_names(head, "layers.0.")

    def translate(self, files: Files, head: HeadConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        return eagle3.translate_shared(files, head, base, table(files.config or {}, "transformer_layer_config"))

    def refusals(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert isinstance(head, Eagle3Config)
        return eagle3.common_refusals(head, base, None)

    def write(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        assert isinstance(head, Eagle3Config) and head.taps
        config = {
            "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3", "speculators_version": VERSION,
            "draft_vocab_size": head.draft_vocab_size, "target_hidden_size": None,
            **{theirs: getattr(head, ours) for theirs, ours in eagle3.NORMS.items()}, "embed_requires_grad": False,
            KEY: boundaries(head.taps, base), "tie_word_embeddings": False,
            **nested_block(head, tensors, base, "llama"),
            "speculators_config": speculators_config("eagle3", head.draft_depth, base),
        }  # fmt: skip
        named = {theirs: tensors[ours] for ours, theirs in self.names(head).items()}
        return ExportFiles(config, named | vocabulary.offsets(tensors))


def nested_block(
    head: DecoderConfig, tensors: dict[str, Tensor], base: PreTrainedModel, model_type: str
) -> dict[str, Any]:
    """The dtype and the nested decoder config of a speculators config."""
    block = block_config(head, tensors, base) | {"model_type": model_type}
    dtype = block.pop("torch_dtype")
    for name in ("rope_theta", "rope_scaling"):
        block.pop(name, None)
    block |= {"attention_bias": head.attention_bias, "mlp_bias": head.mlp_bias}
    return {"dtype": dtype, "transformer_layer_config": block | {"rope_parameters": head.rope_parameters}}


def speculators_config(algorithm: str, depth: int, base: PreTrainedModel) -> dict[str, Any]:
    """The table that says how the head drafts, and for which base."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    verifier = {
        "name_or_path": base_name(base),
        "architectures": base.config.architectures or [type(base).__name__],
    }  # fmt: skip
    return {
        "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [proposal],
        "verifier": verifier,
    }  # fmt: skip


FORMATS = (Speculators(),)
