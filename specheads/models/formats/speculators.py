"""The `speculators` format, which vLLM serves directly: EAGLE-3, P-EAGLE, DSpark, DFlash 1 and 2.

It nests the decoder's config. DSpark and DFlash draft a block in one pass, in which slots attend both ways. Each slot
predicts the next position, or, as in DFlash, its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import Eagle3Config, ParallelConfig
from specheads.heads.config import DecoderConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks import forms, parallel
from specheads.models.formats.eagle import eagle3_parts, latent, peagle
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format
from specheads.models.formats.keys.config_table import flag, table, whole, wholes
from specheads.models.formats.parts.decoder import block_config
from specheads.models.formats.parts.layer_ids import KEY, boundaries, refusal_reason, taps_at
from specheads.models.formats.parts.windows import slots_causal
from specheads.models.formats.serving import HUB_ID, WHOLE_BLOCK, base_name, vllm, vllm_gpu
from specheads.options import shown

VERSION = "0.9.0"
_BLOCK, _LAYERS = "transformer_layer_config", "aux_hidden_state_layer_ids"
_APART = ("eagle", "mtp")  # read by eagle1.py and mtp/shipped.py
_NON_CAUSAL = "sliding_window_non_causal"


@dataclass(frozen=True)
class SpeculatorsEagle3(Format):
    """EAGLE-3. name: as in the names of classes."""

    name: ClassVar[str] = "Eagle3"
    kind: ClassVar[str] = Eagle3Config.kind
    config_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type",)
    classes: ClassVar[str] = r"Eagle3\w*"
    engine: str = "speculators"
    title: str = "speculators EAGLE-3"
    versions: str = f"speculators {VERSION}, vLLM 0.28 to 0.33"
    serving: str = vllm("eagle3", HUB_ID)
    embeds: bool | None = True

    def recognises(self, files: Files) -> bool:
        return "speculators_model_type" in files.config and files.config["speculators_model_type"] not in _APART

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config
        if (kind := config.get("speculators_model_type")) != self.name.lower():
            raise CheckpointError(
                f"{files} is a speculators head of type {shown(kind)}; eagle, eagle3, peagle, mtp, dflash, dflash2 and "
                "dspark ones are read"
            )
        if "norm_before_residual" not in config:
            raise CheckpointError(
                f"{files}: its config does not say norm_before_residual, which vLLM takes for true and others for "
                "false; write what it was trained with into config.json"
            )
        return eagle3_parts.read_options(files, config, table(config, _BLOCK), base)

    def names(self, head: Eagle3Config, stored: Collection[str] = ()) -> dict[str, str]:
        return eagle3_parts.tensor_names(head, "layers.0.")

    def translate(self, files: Files, head: Eagle3Config, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        return eagle3_parts.translate_shared(files, head, base, table(files.config, _BLOCK))

    def refusals(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = [peagle.refusal_reason(head, self.name == "PEagle"), refusal_reason(head.taps or (), base)]
        wrong += [*eagle3_parts.qwen3_bias_refusals(head), *latent.refusals(head, "speculators")]
        return [reason for reason in wrong if reason]

    def config(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        norms = {theirs: getattr(head, ours) for theirs, ours in eagle3_parts.NORMS.items()}
        layers, block = {KEY: boundaries(head.taps or (), base)}, "qwen3" if head.qk_norm else "llama"
        keys = {**norms, "embed_requires_grad": head.own_embeddings, **layers, **self.more_keys(head)}
        return _config(self.name, head, tensors, base, keys, block)

    def more_keys(self, head: Eagle3Config) -> dict[str, Any]:
        return {}

    def rename(self, head: Eagle3Config, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        return super().rename(head, tensors, base) | eagle3_parts.computed_tensors(head, tensors)


@dataclass(frozen=True)
class SpeculatorsPEagle(SpeculatorsEagle3):
    """EAGLE-3 that drafts all depths in one pass."""

    name: ClassVar[str] = "PEagle"
    classes: ClassVar[str] = r"PEagle\w*"
    title: str = "speculators P-EAGLE"
    versions: str = f"speculators {VERSION} and vLLM 0.33, read only"
    serving: str = vllm("eagle3", HUB_ID, parallel=True)

    def recognises(self, files: Files) -> bool:
        return files.config.get("speculators_model_type") == "peagle"

    def more_keys(self, head: Eagle3Config) -> dict[str, Any]:
        return {"mask_token_id": head.mask_token_id}


@dataclass(frozen=True)
class SpeculatorsBlocks(parallel.Parallel):
    """DSpark. name: as in the names of classes."""

    name: ClassVar[str] = "DSpark"
    classes: ClassVar[str] = r"DSpark\w*"
    takes_draft_vocabulary: bool = True
    last: Collection[str] | None = None
    takes_windows: Collection[bool | None] = (True, None)  # vLLM takes layers with windows for causal

    def recognises(self, files: Files) -> bool:
        return files.config.get("speculators_model_type") == self.name.lower()

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config
        if not (layers := wholes(config, _LAYERS)):
            raise CheckpointError(f"{files}: its config has no {_LAYERS}")
        options = parallel.read_options(
            files, config, table(config, _BLOCK), base, taps_at(layers, base),
            whole(config, "mask_token_id", least=0), whole(config, "block_size", 8),
        )  # fmt: skip
        if "sliding_window" in options:
            if config.get(_NON_CAUSAL) is None:
                raise CheckpointError(
                    f"{files}: its layers have windows and its config does not say {_NON_CAUSAL}, which its trainer "
                    "takes for false and vLLM for true; write what it was trained with into config.json"
                )
            options["causal_windows"] = None if flag(config, _NON_CAUSAL) else True
        return options | self.more_options(files)

    def more_options(self, files: Files) -> dict[str, Any]:
        if self.name == "DSpark":
            return forms.read_dspark_options(files, files.config, markov_rank=256, confidence=True)
        return {"sample_from_anchor": flag(files.config, "sample_from_anchor")}

    def more_keys(self, head: ParallelConfig) -> dict[str, Any]:
        return forms.dspark_keys(head) if self.name == "DSpark" else {}

    def config(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        keys = {
            "block_size": head.block_size, _LAYERS: boundaries(head.taps or (), base),
            "mask_token_id": head.mask_token_id,
            # vLLM 0.32 and 0.33 take false as "all layers are causal", those without windows too.
            _NON_CAUSAL: head.sliding_window is None or slots_causal(head) is False,
            "sample_from_anchor": head.sample_from_anchor, **self.more_keys(head),
        }  # fmt: skip
        return _config(self.name, head, tensors, base, keys, "qwen3")


@dataclass(frozen=True)
class SpeculatorsDFlash2(SpeculatorsBlocks):
    """DFlash 2; its forward has no scale or cap of logits."""

    name: ClassVar[str] = "DFlash2"
    classes: ClassVar[str] = r"DFlash2\w*"
    takes_draft_vocabulary: bool = False
    takes: tuple[str, ...] = ("selector",)
    convolved: bool = True
    from_anchor: bool | None = False

    def more_options(self, files: Files) -> dict[str, Any]:
        return super().more_options(files) | forms.read_dflash2_options(files.config, usual=True)

    def more_keys(self, head: ParallelConfig) -> dict[str, Any]:
        return forms.dflash2_keys(head)


@dataclass(frozen=True)
class SpeculatorsDFlash(SpeculatorsBlocks):
    """Heads with sample_from_anchor are read too, but written as DSpark: vLLM supports them under no other method."""

    name: ClassVar[str] = "DFlash"
    classes: ClassVar[str] = r"DFlash(Draft|Speculator)\w*"
    from_anchor: bool | None = False
    takes_windows: Collection[bool | None] = (True, False)


def _config(
    name: str, head: Any, tensors: dict[str, Tensor], base: PreTrainedModel, keys: dict[str, Any], block: str
) -> dict[str, Any]:
    """The config of a head of the class `name`. keys: those of its kind. block: the model_type of its decoder."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": head.served_depth, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    verifier = {"name_or_path": base_name(base), "architectures": base.config.architectures or [type(base).__name__]}
    return {
        "architectures": [f"{name}DraftModel"], "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "speculators_model_type": name.lower(), "speculators_version": VERSION,
        "draft_vocab_size": head.draft_vocab_size, "target_hidden_size": None, "tie_word_embeddings": False, **keys,
        **_nested_block(head, tensors, base, block),
        "speculators_config": {
            "algorithm": name.lower(), "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }  # fmt: skip


def _nested_block(
    head: DecoderConfig, tensors: dict[str, Tensor], base: PreTrainedModel, model_type: str
) -> dict[str, Any]:
    """The dtype and the nested decoder config of a speculators config."""
    block = block_config(head, tensors, base) | {"model_type": model_type, "rope_parameters": head.rope_parameters}
    dtype = block.pop("torch_dtype")
    for name in ("rope_theta", "rope_scaling"):
        block.pop(name, None)
    return {"dtype": dtype, _BLOCK: block | {"attention_bias": head.attention_bias, "mlp_bias": head.mlp_bias}}


FORMATS = (
    SpeculatorsDFlash(
        "speculators", "speculators DFlash", f"speculators {VERSION}, vLLM 0.32 and 0.33",
        vllm("dflash", f"{WHOLE_BLOCK}\n{HUB_ID}"),
    ),
    SpeculatorsBlocks(
        "speculators", "speculators DSpark", f"speculators {VERSION}, vLLM 0.33",
        f"{vllm_gpu('dspark')}\n{HUB_ID}\n", takes=forms.DSPARK_TYPES,
    ),
    SpeculatorsDFlash2(
        "speculators", "speculators DFlash 2", f"speculators {VERSION}, vLLM 0.33",
        f"{vllm_gpu('dflash')}\n{WHOLE_BLOCK}\n{HUB_ID}\n",
    ),
    SpeculatorsPEagle(), SpeculatorsEagle3(),
)  # fmt: skip
