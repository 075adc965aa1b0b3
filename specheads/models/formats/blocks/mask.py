"""mask_embedding.pt beside a DFlash head: the embedding of slots after the root, in place of the mask token's.

Xiaomi's MiMo heads have one. vLLM 0.33 and SGLang 0.5.23 read it: a table of `embedding` (H,) and `mask_token_id`, or
in vLLM the embedding alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files, check_plain, read_values
from specheads.options import shown

FILE, OURS = "mask_embedding.pt", "mask_embed.weight"


def read_mask(files: Files, head: ParallelConfig) -> dict[str, Tensor]:
    """The head's own mask embedding (1, H), {} if there is no such file. CheckpointError for one that would not be read
    as it was meant."""
    if (path := files.find(FILE)) is None:
        return {}
    files.allow(path)
    values = read_values(path)
    values = values if isinstance(values, dict) else {"embedding": values}
    if (token := values.get("mask_token_id", head.mask_token_id)) != head.mask_token_id:
        raise CheckpointError(f"{path} is of token {shown(token)}, and the config's mask_token_id={head.mask_token_id}")
    if values.get("per_position"):
        raise CheckpointError(f"{path} has an embedding for each slot, which no reader supports")
    embedding: Any = values.get("embedding")
    check_plain(path, "embedding", embedding)
    if embedding.shape not in ((head.hidden_size,), (1, head.hidden_size)) or not embedding.is_floating_point():
        raise CheckpointError(
            f"{path}: its embedding is {tuple(embedding.shape)} of {embedding.dtype}, not {head.hidden_size} values"
        )
    return {OURS: embedding.reshape(1, -1)}


def written_mask(head: ParallelConfig, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The file by name, if the head has an embedding of its own."""
    if not head.masks_by_own:
        return {}
    return {FILE: {"mask_token_id": head.mask_token_id, "embedding": tensors[OURS][0].clone()}}
