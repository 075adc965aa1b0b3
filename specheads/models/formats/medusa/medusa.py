"""Medusa as FasterDecoding wrote it and TensorRT-LLM reads it: {head}.{layer}.linear, then {head}.{L} as the output.

Version 1 is a pickle with output matrices. Version 2 is safetensors without them; the base's own is used.
vLLM's own format is below. Shapes: K heads, L layers a head, H hidden, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import MedusaConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, check_sizes, count, dtype_of, output_matrix
from specheads.models.formats.keys.config_table import architectures, flag, whole
from specheads.models.formats.parts import vocabulary
from specheads.models.formats.serving import base_name, vllm


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
    base_config = text_config(base)
    check_sizes(files, {n: whole(config, n, getattr(base_config, n)) for n in ("hidden_size", "vocab_size")}, base)


def refuse_other_counts(files: Files, config: dict[str, Any], counted: dict[str, int]) -> None:
    """CheckpointError if a config has other numbers than its tensors. counted: key → number, of heads and of layers."""
    heads, layers = (whole(config, name, number) for name, number in counted.items())
    if [heads, layers] != [*counted.values()]:
        raise CheckpointError(
            f"{files}: its config says {heads} heads of {layers} layers, and its tensors make up "
            f"{' of '.join(map(str, counted.values()))}"
        )


@dataclass(frozen=True)
class Medusa(Format):
    """shares_layers: the reader uses one module for all layers of a head, so they must be equal."""

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
        counted = files.config.keys() & {*self.config_keys}
        return self.engine == "medusa" and bool(counted or (files.weights and files.weights.name.startswith("medusa_")))

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        names = files.shapes
        if any(name.startswith("medusa_head.") for name in names):
            raise CheckpointError(
                f"{files} is a Medusa-2 model: heads under medusa_head. beside a base that was trained with them, "
                "which no other base replaces; save the base alone and the heads, without that prefix, as "
                "medusa_lm_head.safetensors, and import those with the base"
            )
        refuse_other_sizes(files, files.config, base)
        heads = count(files, "")
        layers = count(files, "0.", ".linear.")
        if not heads or not layers:
            raise CheckpointError(f"{files}: no tensors like 0.0.linear.weight, as Medusa heads have them")
        base_config = text_config(base)
        return {
            "num_heads": heads, "num_layers": layers, "hidden_size": base_config.hidden_size,
            "vocab_size": base_config.vocab_size, "draft_vocab_size": base_config.vocab_size,
        }  # fmt: skip

    def names(self, head: MedusaConfig, stored: Collection[str] = ()) -> dict[str, str]:
        outputs = {f"lm_heads.{h}.weight": f"{h}.{head.num_layers}.weight" for h in range(head.num_heads)}
        return block_names(head, "{h}.{l}.linear.{what}") | outputs

    def translate(self, files: Files, head: MedusaConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        outputs = {ours: theirs for ours, theirs in self.names(head).items() if ours.startswith("lm_heads.")}
        translated: dict[str, Tensor] = {}
        if not any(theirs in files.shapes for theirs in outputs.values()):
            translated = dict.fromkeys(outputs, output_matrix(files, base))
        return translated | full_vocabulary(head), set()

    def refusals(self, head: MedusaConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = tap_refusals(head, base) + vocabulary_refusals(head)
        if self.shares_layers and not _equal_layers(head, tensors):
            wrong.append(f"its {head.num_layers} layers a head differ, and one module is read for all of them")
        return wrong

    def config(self, head: MedusaConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        return {
            "base_model_name_or_path": base_name(base), "medusa_num_heads": head.num_heads,
            "num_medusa_heads": head.num_heads, "medusa_num_layers": head.num_layers,
        }  # fmt: skip


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


@dataclass(frozen=True)
class VllmMedusa(Format):
    """As vLLM up to 0.32 reads it: blocks and lm_heads, with an optional map of the drafted tokens.

    Two variants can hold a draft vocabulary. vLLM's comments describe output matrices (Vd, H) with truncated_vocab_size
    = Vd, but 0.32 fails on them, since it allocates V rows. So all V rows are written. The map and Vd serve to read the
    file back here: vLLM reads a map only if truncated_vocab_size is below V.
    """

    kind: ClassVar[str] = MedusaConfig.kind
    classes: ClassVar[str] = r"Medusa\w*"
    ignored: ClassVar[frozenset[str]] = frozenset({"model_type"})  # it was recognised by
    engine: str = "vllm"
    title: str = "vLLM Medusa"
    embeds: bool | None = None
    versions: str = "vLLM up to 0.32, with which it was run; 0.33 dropped Medusa"
    serving: str = vllm("medusa")

    def recognises(self, files: Files) -> bool:
        config = files.config
        return config.get("model_type") == "medusa" or "MedusaModel" in architectures(config)

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config, names = files.config, files.shapes
        sizes = {name: whole(config, name) for name in ("hidden_size", "vocab_size")}
        check_sizes(files, sizes, base)
        heads = count(files, "blocks.")
        layers = count(files, "blocks.0.layers.")
        refuse_other_counts(files, config, {"num_heads": heads, "num_hidden_layers": layers})
        if not flag(config, "medusa_fc_bias") and any(name.endswith(".bias") for name in names):
            raise CheckpointError(
                f'{files}: it has biases, which vLLM drops unless its config says "medusa_fc_bias": true; write that '
                "where the heads were trained with them, else take the biases away"
            )
        truncated = whole(config, "truncated_vocab_size", sizes["vocab_size"])
        draft = whole(config, "draft_vocab_size", truncated)
        if not draft <= truncated <= sizes["vocab_size"]:
            raise CheckpointError(
                f"{files}: draft_vocab_size={draft}, truncated_vocab_size={truncated} and "
                f"vocab_size={sizes['vocab_size']} do not ascend"
            )
        flag(config, "original_lm_head")  # read again with the tensors
        return {**sizes, "num_heads": heads, "num_layers": layers, "draft_vocab_size": draft}

    def names(self, head: MedusaConfig, stored: Collection[str] = ()) -> dict[str, str]:
        outputs = {f"lm_heads.{h}.weight": f"lm_heads.{h}.weight" for h in range(head.num_heads)}
        return block_names(head, "blocks.{h}.layers.{l}.{what}") | outputs

    def translate(self, files: Files, head: MedusaConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        assert head.hidden_size and head.vocab_size and head.draft_vocab_size
        vocab, draft, shapes = head.vocab_size, head.draft_vocab_size, files.shapes
        if "token_map" in shapes:
            translated, consumed = vocabulary.from_token_map(files, vocab, draft), {"token_map"}
        else:
            if draft != vocab:
                raise CheckpointError(
                    f"{files}: it drafts {draft} of {vocab} tokens, and has no token_map to say which"
                )
            translated, consumed = vocabulary.from_ids(files, "token_map", torch.arange(vocab), vocab), set()
        ids = torch.arange(draft) + translated["d2t"]
        shared, read = flag(files.config, "original_lm_head"), dict[str, Tensor]()
        for h in range(head.num_heads):
            own = f"lm_heads.{h}.weight"
            theirs = next((n for n in ("lm_head.weight", "lm_heads.0.weight") if n in shapes), own) if shared else own
            if theirs not in shapes or not shapes[theirs].is_floating_point():
                continue
            # The file may have all V rows, of which vLLM takes those in the map. Other shapes are refused later.
            whole_vocabulary = draft != vocab and tuple(shapes[theirs].shape) == (vocab, head.hidden_size)
            if whole_vocabulary or (shared and tuple(shapes[theirs].shape) == (draft, head.hidden_size)):
                if theirs not in read:
                    rows = files.tensor(theirs)
                    read[theirs] = rows[ids] if whole_vocabulary else rows
                translated[own] = read[theirs]
                consumed.add(theirs)
        if not any(name.endswith(".bias") for name in shapes):
            zeros = torch.zeros(head.hidden_size, dtype=getattr(torch, dtype_of(shapes)))
            translated |= {
                f"blocks.{h}.{layer}.linear.bias": zeros
                for h in range(head.num_heads)
                for layer in range(head.num_layers)
            }
        return translated, consumed

    def refusals(self, head: MedusaConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        return tap_refusals(head, base)

    def config(self, head: MedusaConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": head.hidden_size,
            "vocab_size": head.vocab_size, "truncated_vocab_size": head.vocab_size, "num_heads": head.num_heads,
            "num_hidden_layers": head.num_layers, "medusa_fc_bias": True, "original_lm_head": False,
            "torch_dtype": dtype_of(tensors),
        }  # fmt: skip
        if head.draft_vocab_size != head.vocab_size:
            config["draft_vocab_size"] = head.draft_vocab_size
        return config

    def rename(self, head: MedusaConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        named = super().rename(head, tensors, base)
        if head.draft_vocab_size != head.vocab_size:
            assert head.vocab_size
            named["token_map"] = ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
            for h in range(head.num_heads):
                named[f"lm_heads.{h}.weight"] = all_rows(tensors[f"lm_heads.{h}.weight"], ids, head.vocab_size)
        return named


def all_rows(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Output rows (Vd, H) of the tokens ids (Vd,) → a full output matrix (V, H) that drafts the same tokens.

    Every other token gets the mean row, so its logit is the mean of theirs, which never exceeds the largest. (A zero
    row's logit would, if all logits are negative.)"""
    whole = rows.float().mean(0).to(rows.dtype).repeat(vocab, 1)
    whole[ids] = rows
    return whole


FORMATS = (
    VllmMedusa(),
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
