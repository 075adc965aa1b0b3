"""Passes of the base that turn rows of tokens into rows of saved features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.data.batches import Collator
from specheads.data.rows import IGNORED
from specheads.decoding.verify.hf_base import text_config
from specheads.decoding.verify.model_inputs import has_position_parts, image_arguments, input_device, row_positions
from specheads.heads.layers.rope import MROPE_AXES
from specheads.losses.chunked import rows_of_chunk
from specheads.losses.teacher import LiveTeacher, TopKTail, gives_logits, packed_mask, tap_base
from specheads.training.features.index import Index
from specheads.training.features.shards import FeatureError, encode_states


class FeaturePasses:
    """The passes of one base, for one index. FeatureError if the base's probabilities cannot be saved as it says."""

    def __init__(self, base: PreTrainedModel, index: Index, processor: Any = None) -> None:
        self.base, self.index = base, index
        if index.teacher_probs == "hidden" and not gives_logits(base):
            raise FeatureError(
                f"{type(base).__name__} does more than its output matrix between the last hidden state and the logits, "
                "so that state does not give its probabilities; save those themselves, with --teacher-probs 64"
            )
        self.collator = Collator(index.pad_token_id, processor=processor)
        self.dtype = getattr(torch, index.dtype)

    def shard(self, rows: Sequence[dict[str, list[int]]], done: Callable[[int], Any]) -> list[dict[str, Tensor]]:
        """The saved rows, in the order given; passes batch rows of similar length. done(n): called after n rows."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        saved: dict[int, dict[str, Tensor]] = {}
        for start in range(0, len(order), self.index.batch_size):
            batch = order[start : start + self.index.batch_size]
            saved |= zip(batch, self._pass([rows[i] for i in batch]), strict=True)
            done(len(batch))
        return [saved[i] for i in range(len(rows))]

    @torch.no_grad()
    def _pass(self, rows: Sequence[dict[str, list[int]]]) -> list[dict[str, Tensor]]:
        saved: list[dict[str, Tensor]] = []
        batch = {name: t.to(input_device(self.base)) for name, t in self.collator(rows).items()}
        documents, positions = batch["document_ids"], batch["position_ids"]
        packed = bool((documents > 1).any())
        mask = packed_mask(self.base, documents, positions) if packed else batch["attention_mask"]
        images = image_arguments(self.base, batch)
        features, teacher = tap_base(self.base, batch["input_ids"], mask, positions, self.index.taps, images)
        parts = features.chunk(len(self.index.taps), -1)
        states = {f"tap_{k}": part for k, part in zip(self.index.taps, parts, strict=True)}
        topk: dict[str, Tensor] = {}
        if isinstance(self.index.teacher_probs, int):
            assert isinstance(teacher, LiveTeacher)
            topk = self._likeliest(teacher, batch["labels"], self.index.teacher_probs)
        elif self.index.teacher_probs == "hidden" and self.index.last_tap is None:
            assert isinstance(teacher, LiveTeacher) and teacher.lm_head is not None
            states["last_hidden"] = teacher.outputs.unflatten(0, documents.shape)
        supervised = (batch["labels"] != IGNORED) & (documents > 0)
        plain = {
            "input_ids": batch["input_ids"], "document_ids": documents, "position_ids": positions,
            "supervised": supervised, **topk,
        }  # fmt: skip
        if self.collator.processor is not None and has_position_parts(self.base):
            # Of every row, as all rows of a file have the same tensors.
            places = row_positions(self.base, batch["input_ids"], batch["attention_mask"], images) if images else None
            table = positions.expand(MROPE_AXES, -1, -1) if places is None else places.table
            plain["base_positions"] = table.permute(1, 2, 0)
        for b, row in enumerate(rows):
            here = slice(0, len(row["input_ids"]))
            saved_row = {name: t[b, here].cpu() for name, t in plain.items()}
            for name, t in states.items():
                saved_row |= encode_states(name, t[b, here], self.dtype)
            saved.append(saved_row)
        return saved

    def _likeliest(self, teacher: LiveTeacher, labels: Tensor, count: int) -> dict[str, Tensor]:
        """The likeliest tokens at the positions before a supervised token; 0 elsewhere. labels (B, T)."""
        asked = torch.zeros_like(labels, dtype=torch.bool)
        asked[:, :-1] = labels[:, 1:] != IGNORED
        positions = asked.flatten().nonzero().squeeze(1)
        size = rows_of_chunk(text_config(self.base).vocab_size, positions.device)
        parts = [TopKTail.from_logits(teacher.logits_at(part), count) for part in positions.split(size)]
        columns = {}
        for name in ("ids", "log_p", "tail"):
            values = torch.cat([getattr(part, name) for part in parts])
            column = values.new_zeros(asked.numel(), *values.shape[1:])
            column[positions] = values
            columns[f"topk_{name}"] = column.unflatten(0, asked.shape)
        return columns
