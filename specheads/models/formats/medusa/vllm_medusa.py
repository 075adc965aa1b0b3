"""Medusa as vLLM up to 0.32 reads it: blocks and lm_heads, with an optional map of the drafted tokens.

Two variants can hold a draft vocabulary. vLLM's comments describe output matrices (Vd, H) with truncated_vocab_size =
Vd, but 0.32 fails on them, since it allocates V rows. So all V rows are written. The map and Vd serve to read the file
back here: vLLM reads a map only if truncated_vocab_size is below V.
Shapes: K heads, L layers a head, H hidden, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import MedusaConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, check_sizes, count, dtype_of
from specheads.models.formats.keys.config_table import architectures, flag, whole
from specheads.models.formats.medusa.fasterdecoding import block_names, tap_refusals
from specheads.models.formats.parts import vocabulary
from specheads.models.formats.serving import vllm


@dataclass(frozen=True)
class VllmMedusa(Format):
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
        claimed = whole(config, "num_heads", heads), whole(config, "num_hidden_layers", layers)
        if claimed != (heads, layers):
            raise CheckpointError(
                f"{files}: its config says {claimed[0]} heads of {claimed[1]} layers, and its tensors make up {heads} "
                f"of {layers}"
            )
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

    def names(self, head: MedusaConfig, found: Collection[str] = ()) -> dict[str, str]:
        outputs = {f"lm_heads.{h}.weight": f"lm_heads.{h}.weight" for h in range(head.num_heads)}
        return block_names(head, "blocks.{h}.layers.{l}.{what}") | outputs

    def translate(self, files: Files, head: MedusaConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        assert head.hidden_size and head.vocab_size and head.draft_vocab_size
        vocab, draft, found = head.vocab_size, head.draft_vocab_size, files.shapes
        if "token_map" in found:
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
            theirs = next((n for n in ("lm_head.weight", "lm_heads.0.weight") if n in found), own) if shared else own
            if theirs not in found or not found[theirs].is_floating_point():
                continue
            # The file may have all V rows, of which vLLM takes those in the map. Other shapes are refused later.
            whole_vocabulary = draft != vocab and tuple(found[theirs].shape) == (vocab, head.hidden_size)
            if whole_vocabulary or (shared and tuple(found[theirs].shape) == (draft, head.hidden_size)):
                if theirs not in read:
                    rows = files.tensor(theirs)
                    read[theirs] = rows[ids] if whole_vocabulary else rows
                translated[own] = read[theirs]
                consumed.add(theirs)
        if not any(name.endswith(".bias") for name in found):
            zeros = torch.zeros(head.hidden_size, dtype=getattr(torch, dtype_of(found)))
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


FORMATS = (VllmMedusa(),)
