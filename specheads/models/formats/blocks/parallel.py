"""What the formats of parallel block heads share: tensor names, the decoder's options, copies of the base's matrices.

They differ in where config keys are, in how they number layers (layer_ids.py), and in which heads they can hold.
Shapes: V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks.forms import form_names, form_refusals
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, check_embeddings, count, output_matrix, scaled_embeddings
from specheads.models.formats.keys.config_table import whole
from specheads.models.formats.parts import layer_ids, vocabulary
from specheads.models.formats.parts.decoder import act_refusals, block_config, block_names, block_options
from specheads.models.formats.parts.positions import EVERY, Positions
from specheads.models.formats.parts.windows import causal_refusals, slots_causal

_NORMS = ("input_layernorm", "q_norm", "k_norm")


@dataclass(frozen=True)
class Parallel(Format):
    """takes: the types of bias (`markov_type`) it supports; with one of DSpark's, a confidence head too. needs_markov:
    requires the bias. convolved: its blocks have convolutions. scaled: supports a scale and a cap of logits.
    takes_mask: supports a mask embedding of the head's own, in place of its mask token's.
    takes_draft_vocabulary: supports a draft vocabulary. causal: whether slots attend only to earlier ones. from_anchor:
    the value of sample_from_anchor. (None for either: given by the config.) takes_biases: supports attention biases.
    last: as in `Eagle3`. positions: the scaled rotary positions it supports. takes_windows: see `causal_refusals`."""

    kind: ClassVar[str] = ParallelConfig.kind
    engine: str
    title: str
    versions: str
    serving: str
    embeds: bool | None = None
    takes: tuple[str, ...] = ()
    convolved: bool = False
    scaled: bool = False
    takes_mask: bool = False
    takes_draft_vocabulary: bool = False
    causal: bool | None = False
    from_anchor: bool | None = None
    needs_markov: bool = False
    takes_biases: bool = True
    last: Collection[str] | None = ()
    positions: Positions = EVERY
    takes_windows: Collection[bool | None] = ()

    def names(self, head: ParallelConfig, stored: Collection[str] = ()) -> dict[str, str]:
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
        names |= form_names(head)
        return names

    def translate(
        self, files: Files, head: ParallelConfig, base: PreTrainedModel
    ) -> tuple[dict[str, Tensor], set[str]]:
        assert head.vocab_size and head.draft_vocab_size
        translated, consumed = vocabulary.from_offsets(files, head.vocab_size, head.draft_vocab_size)
        for name, matrix in (("embed_tokens.weight", None), ("lm_head.weight", output_matrix)):
            if name in files.shapes and (matrix is None or head.draft_vocab_size == head.vocab_size):
                check_embeddings(files, name, base, None if matrix is None else matrix(files, base))
                consumed.add(name)
        return translated, consumed

    def refusals(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = [layer_ids.refusal_reason(head.taps or (), base, self.last)]
        whole = any(reach.kind == "full" for reach in head.reaches)
        if self.causal is not None and whole and head.causal != self.causal and head.block_size > 1:
            wrong.append(
                "its slots attend only to earlier ones (causal), and this format's to the whole block" if head.causal
                else "its slots attend both ways (causal=false), and this format's only to earlier ones"
            )  # fmt: skip
        if self.from_anchor is not None and head.sample_from_anchor != self.from_anchor:
            wrong.append(
                f"its slots predict {_position(head.sample_from_anchor)} (sample_from_anchor), and its readers' "
                f"{_position(self.from_anchor)}"
            )
        wrong += form_refusals(head, self.takes, self.convolved, self.scaled)
        if not self.takes_draft_vocabulary and head.draft_vocab_size != head.vocab_size:
            wrong.append(f"it drafts {head.draft_vocab_size} of {head.vocab_size} tokens, and its readers draft all")
        if head.mask_token_id is None or (head.masks_by_own and not self.takes_mask):
            wrong.append(
                "its slots after the root read an embedding of its own, and this format's a token of the base "
                "(mask_token_id)"
            )
        if self.needs_markov and not head.markov_rank:
            wrong.append("it has no Markov bias (markov_rank=0), without which its readers do not load it")
        if head.attention_bias and not self.takes_biases:
            wrong.append("its attention has biases, which its readers do not have")
        if self.engine == "llamacpp":
            wrong += layer_ids.llamacpp_refusals(base)
        wrong += self.positions.refusals(head) + scaled_embeddings(base)
        wrong += act_refusals(head) + causal_refusals(head, self.takes_windows)
        if head.mlp_bias:
            wrong.append("its decoder has biases in the MLP, which Qwen3's lacks")
        return [reason for reason in wrong if reason]

    def rename(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        return super().rename(head, tensors, base) | vocabulary.offsets(tensors)


def qwen3_config(
    architecture: str, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel
) -> dict[str, Any]:
    """The config of a Qwen3 model of so many layers, with the size of a block and of the draft vocabulary."""
    config = {
        "architectures": [architecture], "layer_types": ["full_attention"] * head.num_layers,
        **block_config(head, tensors, base), "model_type": "qwen3", "attention_bias": head.attention_bias,
        "block_size": head.block_size, "num_target_layers": text_config(base).num_hidden_layers,
    }  # fmt: skip
    if head.draft_vocab_size != head.vocab_size:
        config["draft_vocab_size"] = head.draft_vocab_size
    if head.sliding_window is not None and (causal := slots_causal(head)) is not None:
        config["is_causal"] = causal
    return config


def _position(from_anchor: bool) -> str:
    return "the position after their own" if from_anchor else "their own position"


def read_options(
    files: Files, config: dict[str, Any], block: dict[str, Any], base: PreTrainedModel, taps: tuple[int, ...],
    mask: int, size: int,
) -> dict[str, Any]:  # fmt: skip
    """The options of a head, except for those of the Markov bias and confidence head.

    block: the config of its decoder, which may be nested. taps: the hidden_states it reads. mask: id of the mask token.
    size: slots in a block. CheckpointError if no head here can represent it."""
    options = block_options(files, block, base, count(files, "layers."), "qwen3")
    draft = whole(config, "draft_vocab_size", options["vocab_size"])
    if draft > options["vocab_size"]:
        raise CheckpointError(f"{files}: draft_vocab_size={draft} exceeds the vocabulary of {options['vocab_size']}")
    if size > 4096:
        raise CheckpointError(f"{files}: block_size={size} is more than any draft")
    return {
        **options, "draft_vocab_size": draft, "taps": layer_ids.readable(files, taps, base), "causal": False,
        "block_size": size, "draft_depth": min(size, 8), "mask_token_id": mask, "markov_rank": 0, "confidence": False,
    }  # fmt: skip
