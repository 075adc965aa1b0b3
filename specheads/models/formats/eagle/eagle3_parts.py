"""What the forms of EAGLE-3 share, speculators' among them: the names of tensors, and how a config is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import Eagle3Config
from specheads.models.files import CheckpointError
from specheads.models.formats.eagle import latent, peagle
from specheads.models.formats.files import Files
from specheads.models.formats.format import check_embeddings, count, embeddings_of, output_matrix
from specheads.models.formats.keys.config_table import agreed, architectures, flag, refusal, table, whole
from specheads.models.formats.parts import layer_ids, vocabulary
from specheads.models.formats.parts.decoder import block_names, block_options, outer_names, zero_biases
from specheads.models.formats.parts.layer_ids import TABLE

QWEN3 = "Eagle3Qwen3ForCausalLM"  # the architecture with Qwen3's blocks
# Flags that move a norm, at the top and in the table → the option of heads here.
NORMS = {
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "fc_norm": "norm_features",
    "norm_output": "norm_output",
}  # fmt: skip
INSIDE = {"norm_before_fc": "norm_before_fc", "return_hidden_post_norm": "norm_output"}
_OLDER_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")  # of fc_norm, with use_aux_norm
# Name prefix of decoder block 0 → that of a later block. "midlayer.0.": ModelOpt's Megatron exporter, several blocks.
BLOCKS = {"midlayer.": "layers.{}.", "layers.0.": "layers.{}.", "midlayer.0.": "midlayer.{}."}
_OWN = {
    "fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight",
    "input_layernorm.weight": "{first}input_layernorm.weight", "hidden_norm.weight": "{first}hidden_norm.weight",
}  # fmt: skip


def tensor_names(head: Eagle3Config, first: str, stored: Collection[str] = ()) -> dict[str, str]:
    """Our name → theirs, except for the vocabulary.

    first: the prefix of decoder block 0, unless `stored`, the names in a file, have another. They also give the name of
    a later block's first norm (hidden_norm in ModelOpt and SGLang)."""
    first = next((each for each in BLOCKS if f"{each}hidden_norm.weight" in stored), first)
    names = {ours: theirs.format(first=first) for ours, theirs in _OWN.items()}
    if head.norm_features:
        assert head.taps
        norms = [f"fc_norm.{i}.weight" for i in range(len(head.taps))]
        older = len(norms) == len(_OLDER_NORMS) and _OLDER_NORMS[0] in stored
        names |= dict(zip(norms, _OLDER_NORMS if older else norms, strict=True))
    if head.norm_before_fc:
        names["input_norm.weight"] = "input_norm.weight"
    if head.own_embeddings:
        names["embed_tokens.weight"] = "embed_tokens.weight"
    names |= _block_names(head, 0, first)
    for i in range(head.num_layers if head.qk_norm else 0):
        theirs = BLOCKS[first].format(i) if i else first
        names |= {f"blocks.{i}.{norm}.weight": f"{theirs}self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")}
    for i in range(1, head.num_layers):
        later = BLOCKS[first].format(i)
        other = f"{later}hidden_norm.weight" in stored and f"{later}input_layernorm.weight" not in stored
        names |= _block_names(head, i, later, "hidden_norm" if other else "input_layernorm")
    return names


def _block_names(head: Eagle3Config, i: int, theirs: str, norm: str = "input_layernorm") -> dict[str, str]:
    if head.kv_lora_rank is None:
        return block_names(head, i, theirs, norm)
    return outer_names(head, i, theirs, norm) | latent.attention_names(head, i, theirs)


def read_options(files: Files, config: dict[str, Any], block: dict[str, Any], base: PreTrainedModel) -> dict[str, Any]:
    """Head options from a config and its decoder block's config, which may be nested in it."""
    midlayers = count(files, "midlayer.") or any(name.startswith("midlayer.") for name in files.shapes)
    layers = count(files, "layers.") + midlayers
    norms = _read_norms(files, config, layers)
    names = architectures(config) if block is config else []
    kind = "qwen3" if QWEN3 in names or (block is not config and block.get("model_type") == "qwen3") else "llama"
    is_latent = block is config and latent.has_latent_attention(config)
    options = block_options(files, block, base, layers, "latent" if is_latent else kind)
    options |= {"qk_norm": kind == "qwen3"}
    if is_latent:
        options |= latent.read_sizes(files, config, options["rope_parameters"])
    mask = peagle.read_token(files, config)
    # P-EAGLE's trainers train the embeddings, and only speculators says so in the config.
    own = mask is not None and "embed_tokens.weight" in files.shapes
    options |= {"own_embeddings": flag(config, "embed_requires_grad", own), "mask_token_id": mask}
    draft = whole(config, "draft_vocab_size", options["vocab_size"])
    if draft > options["vocab_size"]:
        raise CheckpointError(f"{files}: draft_vocab_size={draft} exceeds the vocabulary of {options['vocab_size']}")
    taps = layer_ids.read_taps(files, config, base)
    if (claimed := whole(config, "num_aux_hidden_states", len(taps))) != len(taps):
        raise CheckpointError(f"{files}: num_aux_hidden_states={claimed}, and it reads hidden_states {list(taps)}")
    return {**options, **norms, "draft_vocab_size": draft, "taps": taps}


def qwen3_bias_refusals(head: Eagle3Config) -> list[str]:
    """Why vLLM does not read the biases of Qwen3's block; [] if there are none."""
    if head.qk_norm and (head.attention_bias or head.mlp_bias):
        return ["its blocks are Qwen3's with biases, and vLLM drops that of o_proj and has none in the MLP"]
    return []


def translate_shared(
    files: Files, head: Eagle3Config, base: PreTrainedModel, block: dict[str, Any]
) -> tuple[dict[str, Tensor], set[str]]:
    """d2t and t2d, defaults for a missing lm_head or bias, and the file's names used. Embeddings in the file are
    compared with the base's.

    block: the config of the head's decoder."""
    assert head.vocab_size and head.draft_vocab_size
    translated, consumed = vocabulary.from_offsets(files, head.vocab_size, head.draft_vocab_size)
    if "embed_tokens.weight" in files.shapes and not head.own_embeddings:
        check_embeddings(files, "embed_tokens.weight", base)
        consumed.add("embed_tokens.weight")
    if "lm_head.weight" not in files.shapes:
        translated["lm_head.weight"] = _shared_output(files, head, base)
    masked = peagle.read_mask(files) if head.mask_token_id is not None else {}
    return translated | masked | zero_biases(files, block, head), consumed | ({peagle.MASK} if masked else set())


def computed_tensors(head: Eagle3Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors that `tensor_names` does not give: d2t and t2d, and P-EAGLE's vector in place of features."""
    return vocabulary.offsets(tensors) | peagle.mask_tensor(tensors)


def _shared_output(files: Files, head: Eagle3Config, base: PreTrainedModel) -> Tensor:
    """The base's output matrix (V, H), with which servers draft if a file has none.

    CheckpointError where they would not use it: with a draft vocabulary, or if tie_word_embeddings makes SGLang use
    another matrix."""
    if head.draft_vocab_size != head.vocab_size:
        raise CheckpointError(
            f"{files}: it has no lm_head.weight and drafts {head.draft_vocab_size} of {head.vocab_size} tokens; the "
            "base's, with which a head without one drafts, is for all of them"
        )
    matrix = output_matrix(files, base)
    if flag(files.config, "tie_word_embeddings") and not torch.equal(matrix, embeddings_of(base).to("cpu")):
        raise CheckpointError(
            f"{files}: it has no lm_head.weight, and its config says tie_word_embeddings=true of a base whose output "
            "matrix is not its embeddings; its readers would draft with different ones"
        )
    return matrix


def _read_norms(files: Files, config: dict[str, Any], layers: int) -> dict[str, bool]:
    """The head options that place norms. layers: the number of decoder blocks. CheckpointError, with the option and its
    value, if heads here do not support it."""
    inner = table(config, TABLE)
    if not flag(inner, "next_layer_regular", True) and layers > 1:  # it has no effect with one block
        raise refusal(files, f"{TABLE}.next_layer_regular", False)
    if flag(inner, "has_lm_head") and "lm_head.weight" not in files.shapes:
        raise CheckpointError(f"{files}: its config says {TABLE}.has_lm_head=true, and it has no lm_head.weight")
    return {ours: _norm(files, config, inner, theirs, ours) for theirs, ours in NORMS.items()}


def _norm(files: Files, config: dict[str, Any], inner: dict[str, Any], theirs: str, ours: str) -> bool:
    if theirs == "fc_norm" and flag(config, "use_aux_norm"):  # SGLang's older spelling
        return True
    values = {theirs: flag(config, theirs)} if config.get(theirs) is not None else {}
    for name, option in INSIDE.items():
        if option == ours and inner.get(name) is not None:
            values[f"{TABLE}.{name}"] = flag(inner, name)
    return agreed(files, values)
