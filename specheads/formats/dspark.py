"""DSpark in the `speculators` form: a block drafted at once over the target's features, and a bias by the token before.

Its slots see one another both ways, and slot j speaks of the token j + 1 places behind the root (sample_from_anchor).
In DFlash a slot speaks of its own place, which is another network: refused. Shapes: V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.formats import layer_ids, vocabulary
from specheads.formats.decoder import block_names, block_options
from specheads.formats.files import Files, flag, shown, table, whole, wholes
from specheads.formats.format import Format, Written, check_embeddings, count, output_matrix
from specheads.formats.speculators import VERSION, nested_block, speculators_config
from specheads.heads import HeadConfig, ParallelConfig
from specheads.saved_head import CheckpointError
from specheads.target import text_config

_KINDS = ("dspark", "dflash")
_LAYERS = "aux_hidden_state_layer_ids"
_NORMS = ("input_layernorm", "q_norm", "k_norm")


@dataclass(frozen=True)
class DSpark(Format):
    kind: ClassVar[str] = ParallelConfig.kind
    engine: str = "speculators"
    title: str = "speculators DSpark"
    versions: str = f"speculators {VERSION}, vLLM 0.33"
    serving: str = """\
```bash
vllm serve $base --speculative-config '{"method": "dspark", "model": "$folder", "num_speculative_tokens": $depth}'
```

Where the base is a hub id, `vllm serve $folder` is enough: the config names it.
"""
    embeds: bool | None = None

    def recognises(self, files: Files) -> bool:
        return (files.config or {}).get("speculators_model_type") in _KINDS

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config = files.config or {}
        spark = config.get("speculators_model_type") == "dspark"
        if not flag(config, "sample_from_anchor", default=spark):
            raise CheckpointError(
                f"{files}: sample_from_anchor=false, as DFlash has it: its slots speak of their own place, and those "
                "of heads here of the one behind"
            )
        block = table(config, "transformer_layer_config")
        if "sliding_attention" in str(block.get("layer_types")):
            raise CheckpointError(f"{files}: it has sliding_attention layers; those of heads here see everything")
        rank = whole(config, "markov_rank", 256, least=0) if spark else 0
        if rank and (variant := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise CheckpointError(f"{files}: markov_head_type={shown(variant)}; heads here have the vanilla one")
        sure = spark and flag(config, "enable_confidence_head", default=True)
        if sure and rank and not flag(config, "confidence_head_with_markov", default=True):
            raise CheckpointError(f"{files}: confidence_head_with_markov=false; heads here read the token before too")
        layers = text_config(base).num_hidden_layers
        taps = wholes(config, _LAYERS) or ()
        if wrong := layer_ids.refusal(taps, layers) or ("" if taps else f"its config has no {_LAYERS}"):
            raise CheckpointError(f"{files}: {wrong}")
        options = block_options(files, block, base, count(files, "layers."), "qwen3")
        draft = whole(config, "draft_vocab_size", options["vocab_size"])
        if draft > options["vocab_size"]:
            raise CheckpointError(
                f"{files}: draft_vocab_size={draft} exceeds the vocabulary of {options['vocab_size']}"
            )
        if (size := whole(config, "block_size", 8)) > 4096:
            raise CheckpointError(f"{files}: block_size={size} is more than any draft")
        return {
            **options, "draft_vocab_size": draft, "taps": taps, "causal": False, "block_size": size,
            "draft_depth": min(size, 8), "mask_token_id": whole(config, "mask_token_id", least=0), "markov_rank": rank,
            "confidence": sure,
        }  # fmt: skip

    def names(self, head: HeadConfig, found: Collection[str] = ()) -> dict[str, str]:
        assert isinstance(head, ParallelConfig)
        names = {f"{n}.weight": f"{n}.weight" for n in ("fc", "hidden_norm", "norm")}
        for i in range(head.num_layers):
            theirs = f"layers.{i}."
            block = block_names(head, 0, theirs)
            names |= {f"decoder.{i}.{ours.removeprefix('blocks.0.')}": name for ours, name in block.items()}
            for norm in _NORMS:
                names[f"decoder.{i}.{norm}.weight"] = (
                    f"{theirs}{'' if norm == _NORMS[0] else 'self_attn.'}{norm}.weight"
                )
        if head.draft_vocab_size != head.vocab_size:
            names["lm_head.weight"] = "lm_head.weight"
        if head.markov_rank:
            names |= {
                "markov_embed.weight": "markov_head.markov_w1.weight",
                "markov_lm_head.weight": "markov_head.markov_w2.weight",
            }
        if head.confidence:
            names |= {f"confidence.{w}": f"confidence_head.proj.{w}" for w in ("weight", "bias")}
        return names

    def special(self, files: Files, head: HeadConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        assert isinstance(head, ParallelConfig) and head.vocab_size and head.draft_vocab_size
        made, looked_at = vocabulary.from_offsets(files, head.vocab_size, head.draft_vocab_size)
        for name, own in (("embed_tokens.weight", None), ("lm_head.weight", output_matrix)):
            if name in files.shapes and (own is None or head.draft_vocab_size == head.vocab_size):
                check_embeddings(files, name, base, None if own is None else own(files, base))
                looked_at.add(name)
        return made, looked_at

    def refusals(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert isinstance(head, ParallelConfig)
        wrong = [layer_ids.refusal(head.taps or (), text_config(base).num_hidden_layers)]
        if head.causal and head.block_size > 1:
            wrong.append("its slots see only those before them (causal), and all of a block are seen")
        if head.mask_token_id is None:
            wrong.append(
                "it has an embedding of its own behind the root, and a token of the base is read (mask_token_id)"
            )
        return [reason for reason in wrong if reason]

    def write(self, head: HeadConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> Written:
        assert isinstance(head, ParallelConfig) and head.taps
        config = {
            "architectures": ["DSparkDraftModel"], "auto_map": {"": "config.DSparkSpeculatorConfig"},
            "speculators_model_type": "dspark", "speculators_version": VERSION, "block_size": head.block_size,
            "draft_vocab_size": head.draft_vocab_size, "target_hidden_size": None, _LAYERS: list(head.taps),
            "mask_token_id": head.mask_token_id, "sliding_window_non_causal": False, "sample_from_anchor": True,
            "markov_rank": head.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": head.confidence,
            "confidence_head_with_markov": head.markov_rank > 0, "tie_word_embeddings": False,
            **nested_block(head, tensors, base, "qwen3"),
            "speculators_config": speculators_config("dspark", head.block_size, base),
        }  # fmt: skip
        named = {theirs: tensors[ours] for ours, theirs in self.names(head).items()}
        return Written(config, named | vocabulary.offsets(tensors))


FORMATS = (DSpark(),)
