"""Medusa as FasterDecoding wrote it and TensorRT-LLM reads it: {head}.{layer}.linear, then {head}.{L} as the output.

Version 1 is a pickle with output matrices. Version 2 is safetensors without them; the base's own is used.
Shapes: K heads, L layers a head, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import HeadConfig, MedusaConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.config_values import whole
from specheads.models.formats.files import Files
from specheads.models.formats.format import ExportFiles, Format, check_sizes, count, output_matrix
from specheads.models.formats.serving import base_name


def block_names(head: MedusaConfig, theirs: str) -> dict[str, str]:
    """Our name → theirs for every ResBlock. theirs: a template with {h} (head), {l} (layer) and {what} (parameter)."""
    return {
        f"blocks.{h}.{layer}.linear.{what}": theirs.format(h=h, l=layer, what=what)
        for h in range(head.num_heads)
        for layer in range(head.num_layers)
        for what in ("weight", "bias")
    }


def tap_refusals(head: Any, base: PreTrainedModel) -> list[str]:
    """Why no format can hold a head that reads another layer: Medusa and Hydra always read the final norm's output."""
    layers = text_config(base).num_hidden_layers
    if head.tap == layers:
        return []
    return [f"it reads hidden_states {head.tap}, and such heads read the output of the final norm ({layers})"]


# Some publish the base's config with the head's keys added. Heads without layers of the base's form read none of these.
OF_THE_BASE = frozenset(
    {
        "architectures", "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types", "attention_bias", "mlp_bias",
    }
)  # fmt: skip


def refuse_other_sizes(files: Files, config: dict[str, Any], base: PreTrainedModel) -> None:
    """CheckpointError if a config says sizes, and they are not the base's."""
    own = text_config(base)
    check_sizes(files, {n: whole(config, n, getattr(own, n)) for n in ("hidden_size", "vocab_size")}, base)


@dataclass(frozen=True)
class Medusa(Format):
    """shares_layers: the reader uses one module for all layers of a head, so they must be equal. weights: the name of
    the weights file."""

    kind: ClassVar[str] = MedusaConfig.kind
    config_keys: ClassVar[tuple[str, ...]] = ("medusa_num_heads", "num_medusa_heads")
    # Heads and layers are counted from the tensors, since version 1's published config always says 2 heads.
    ignored: ClassVar[frozenset[str]] = OF_THE_BASE | {"medusa_num_heads", "num_medusa_heads", "medusa_num_layers"}
    engine: str
    title: str
    versions: str
    serving: str
    shares_layers: bool
    weights: str
    embeds: bool | None = None

    def recognises(self, files: Files) -> bool:
        counted = (files.config or {}).keys() & {*self.config_keys}
        return self.engine == "medusa" and bool(counted or (files.weights and files.weights.name.startswith("medusa_")))

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        names = files.shapes
        if any(name.startswith("medusa_head.") for name in names):
            raise CheckpointError(
                f"{files} is a Medusa-2 model: heads under medusa_head. beside a base that was trained with them, "
                "which no other base replaces; save the base alone and the heads, without that prefix, as "
                "medusa_lm_head.safetensors, and import those with the base"
            )
        refuse_other_sizes(files, files.config or {}, base)
        heads = count(files, "")
        layers = count(files, "0.", ".linear.")
        if not heads or not layers:
            raise CheckpointError(f"{files}: no tensors like 0.0.linear.weight, as Medusa heads have them")
        own = text_config(base)
        return {
            "num_heads": heads, "num_layers": layers, "hidden_size": own.hidden_size, "vocab_size": own.vocab_size,
            "draft_vocab_size": own.vocab_size,
        }  # fmt: skip

    def names(self, head: HeadConfig, found: Collection[str] = ()) -> dict[str, str]:
        assert isinstance(head, MedusaConfig)
        outputs = {f"lm_heads.{h}.weight": f"{h}.{head.num_layers}.weight" for h in range(head.num_heads)}
        return block_names(head, "{h}.{l}.linear.{what}") | outputs

    def translate(self, files: Files, head: HeadConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        assert isinstance(head, MedusaConfig)
        outputs = {ours: theirs for ours, theirs in self.names(head).items() if ours.startswith("lm_heads.")}
        translated: dict[str, Tensor] = {}
        if not any(theirs in files.shapes for theirs in outputs.values()):
            translated = dict.fromkeys(outputs, output_matrix(files, base))
        return translated | full_vocabulary(head), set()

    def refusals(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert isinstance(head, MedusaConfig)
        wrong = tap_refusals(head, base) + vocabulary_refusals(head)
        if self.shares_layers and not _equal_layers(head, tensors):
            wrong.append(f"its {head.num_layers} layers a head differ, and one module is read for all of them")
        return wrong

    def write(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        assert isinstance(head, MedusaConfig)
        config = {
            "base_model_name_or_path": base_name(base),
            "medusa_num_heads": head.num_heads, "num_medusa_heads": head.num_heads,
            "medusa_num_layers": head.num_layers,
        }  # fmt: skip
        named = {theirs: tensors[ours] for ours, theirs in self.names(head).items()}
        return ExportFiles(config, named, weights=self.weights)


def vocabulary_refusals(head: MedusaConfig) -> list[str]:
    """Why a format without a draft vocabulary cannot hold a head that drafts only some of the tokens."""
    if head.draft_vocab_size == head.vocab_size:
        return []
    return [f"it drafts {head.draft_vocab_size} of {head.vocab_size} tokens, and the format cannot say which"]


def full_vocabulary(head: MedusaConfig) -> dict[str, Tensor]:
    """d2t (V,) and t2d (V,) of a head that can draft every token."""
    assert head.vocab_size
    return {
        "d2t": torch.zeros(head.vocab_size, dtype=torch.long), "t2d": torch.ones(head.vocab_size, dtype=torch.bool)
    }  # fmt: skip


def _equal_layers(head: MedusaConfig, tensors: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(tensors[f"blocks.{h}.{layer}.linear.{what}"], tensors[f"blocks.{h}.0.linear.{what}"])
        for h in range(head.num_heads)
        for layer in range(1, head.num_layers)
        for what in ("weight", "bias")
    )


FORMATS = (
    Medusa(
        "medusa", "Medusa (FasterDecoding's format)", "FasterDecoding/Medusa, version 1", """\
```bash
python -m medusa.inference.cli --model $folder_arg
```
""",
        shares_layers=True, weights="medusa_lm_head.pt",
    ),
    Medusa(
        "trtllm", "Medusa for TensorRT-LLM", "TensorRT-LLM with the engine backend, which alone has Medusa", """\
```bash
python examples/medusa/convert_checkpoint.py --model_dir $base_arg --medusa_model_dir $folder_arg \\
  --output_dir $folder_arg/medusa_ckpt --num_medusa_heads $depth
trtllm-build --checkpoint_dir $folder_arg/medusa_ckpt --output_dir $folder_arg/medusa_engine \\
  --speculative_decoding_mode medusa
```
""",
        shares_layers=False, weights="medusa_lm_head.safetensors",
    ),
)  # fmt: skip
