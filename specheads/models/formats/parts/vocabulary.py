"""The draft vocabulary in foreign formats: offsets d2t with or without t2d, or a list of target ids.

Shapes: V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.heads.vocabulary import draft_offsets
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files


def from_offsets(files: Files, vocab: int, draft: int) -> tuple[dict[str, Tensor], set[str]]:
    """Our d2t and t2d from the file's, and the names used. t2d may be missing, and d2t too if Vd = V."""
    consumed = {"d2t", "t2d"} & set(files.shapes)
    if "d2t" in consumed:
        ids = _integers(files, "d2t", draft)  # checks the size before arange: untrusted configs allocate nothing
        ids = ids + torch.arange(draft)
    elif draft == vocab:
        ids = torch.arange(vocab)
    else:
        raise CheckpointError(f"{files}: it drafts {draft} of {vocab} tokens, and has no d2t to say which")
    vocabulary = from_ids(files, "d2t", ids, vocab)
    if "t2d" in consumed:
        stored = files.shapes["t2d"]
        if stored.shape != (vocab,) or stored.is_floating_point():
            raise CheckpointError(
                f"{files}: t2d is {tuple(stored.shape)} of {stored.dtype}, not ({vocab},) of torch.bool"
            )
        if not torch.equal(files.tensor("t2d").bool(), vocabulary["t2d"]):
            raise CheckpointError(f"{files}: t2d and d2t do not name the same {draft} tokens")
    return vocabulary, consumed


def from_token_map(files: Files, vocab: int, draft: int) -> dict[str, Tensor]:
    """Our d2t and t2d from token_map, a list of target ids (Vd,)."""
    return from_ids(files, "token_map", _integers(files, "token_map", draft), vocab)


def from_ids(files: Files, name: str, ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """d2t (Vd,) and t2d (V,) for target ids (Vd,). CheckpointError if they are not distinct tokens."""
    try:
        d2t, t2d = draft_offsets(ids, vocab)
    except ValueError as error:
        raise CheckpointError(f"{files}: {name} {error}") from error
    return {"d2t": d2t, "t2d": t2d}


def _integers(files: Files, name: str, size: int) -> Tensor:
    stored = files.shapes[name]
    if stored.shape != (size,) or stored.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(
            f"{files}: {name} is {tuple(stored.shape)} of {stored.dtype}, not ({size},) of torch.int64"
        )
    return files.tensor(name).long()


def offsets(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """d2t and t2d as offsets, to be written; {} if Vd = V, since vLLM raises on an unexpected d2t."""
    return {} if len(tensors["d2t"]) == len(tensors["t2d"]) else {"d2t": tensors["d2t"], "t2d": tensors["t2d"]}
