"""Rows of token ids → packed sequences → padded batches. B batch rows, T tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.data.images import TYPES, image_tensors
from specheads.data.rows import IGNORED, Row


def pack(rows: Iterable[Row], max_length: int) -> list[Row]:
    """Rows → sequences of at most max_length tokens, each row in the fullest open sequence that still has room for it.

    Adds document_ids (1, 1, 2, 2, 2, …) and position_ids, which restart with each document. The first token of a
    document is never supervised. Raises ValueError for a row longer than max_length.
    """
    sequences: list[Row] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), sorted
    for row in rows:
        length = len(row["input_ids"])
        if length > max_length:
            raise ValueError(f"a row of {length} tokens does not fit max_length={max_length}: truncate or chunk first")
        slot = bisect_left(room, (length, -1))
        if slot < len(room):
            free, index = room.pop(slot)
        else:
            free, index = max_length, len(sequences)
            sequences.append({"input_ids": [], "labels": [], "document_ids": [], "position_ids": []})
        sequence = sequences[index]
        document = sequence["document_ids"][-1] + 1 if sequence["document_ids"] else 1
        sequence["input_ids"] += row["input_ids"]
        sequence["labels"] += [IGNORED, *row["labels"][1:]][:length]
        sequence["document_ids"] += [document] * length
        sequence["position_ids"] += range(length)
        if free > length:
            insort(room, (free - length, index))
    return sequences


@dataclass(frozen=True)
class Collator:
    """Rows → a batch padded on the right to its longest row: int64 tensors, (B, T) each.

    input_ids, attention_mask (1 on tokens), labels (-100 on padding), position_ids, document_ids (0 on padding; 1 on
    all tokens of an unpacked row). T is rounded up to pad_to_multiple_of. A row may already be padded, as shown by its
    attention_mask, or packed, as shown by its position_ids alone. processor: the base's, which reads the images of rows
    that have some: the batch then has mm_token_type_ids (B, T), 0 where a token is text, and the processor's tensors
    (pixel_values …) of all images, in the order of the rows.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    processor: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or self.pad_token_id < 0:
            raise ValueError(f"pad_token_id={self.pad_token_id!r}: expected a token id; eos_token_id will do")
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={self.pad_to_multiple_of}: expected None or at least 1")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        longest, multiple = max(len(row["input_ids"]) for row in rows), self.pad_to_multiple_of or 1
        width = -(-longest // multiple) * multiple
        padding = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "labels": IGNORED,
            "position_ids": 0,
            "document_ids": 0,
        }
        batch = {name: torch.full((len(rows), width), value) for name, value in padding.items()}
        for b, row in enumerate(rows):
            length = len(row["input_ids"])
            seen = torch.as_tensor(row.get("attention_mask", torch.ones(length, dtype=torch.int64)))
            position = torch.as_tensor(row.get("position_ids", (seen.cumsum(0) - 1).clamp_min(0)))
            documents = documents_of(position.unsqueeze(0), seen.unsqueeze(0)) if "position_ids" in row else seen
            columns = {"attention_mask": seen, "position_ids": position, "document_ids": documents, **row}
            for name in padding:
                batch[name][b, :length] = torch.as_tensor(columns[name], dtype=torch.int64)
        return batch | self._images(rows, width)

    def _images(self, rows: Sequence[Mapping[str, Any]], width: int) -> dict[str, Tensor]:
        images = [image for row in rows for image in row.get("images") or ()]
        if not images:
            return {}
        if self.processor is None:
            raise ValueError("rows have images, and the collator no processor: Collator(…, processor=AutoProcessor…)")
        types = torch.zeros(len(rows), width, dtype=torch.int64)
        for b, row in enumerate(rows):
            if row.get("images"):
                types[b, : len(row[TYPES])] = torch.as_tensor(row[TYPES])
        return {TYPES: types, **image_tensors(self.processor, images)}


def documents_of(position_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
    """Positions (B, T) → document ids (B, T): a position that does not increase starts a document; 0 where the mask
    (B, T) is 0.

    None for positions on several axes (3, B, T), as with images, which may stay the same within a document."""
    if position_ids.dim() > 2:
        return None
    seen, positions = attention_mask.bool(), position_ids.expand_as(attention_mask)
    restarts = torch.zeros_like(seen)
    restarts[:, 1:] = (positions[:, 1:] <= positions[:, :-1]) & seen[:, :-1]
    return torch.where(seen, 1 + restarts.cumsum(1), 0)


def positions_of(documents: Tensor) -> Tensor:
    """(B, T) document ids → (B, T) the position of each token in its document; 0 at padding."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    start = torch.where(is_first, index, 0).cummax(1).values
    return torch.where(documents > 0, index - start, 0)
