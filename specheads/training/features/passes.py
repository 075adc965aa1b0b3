"""Rows of tokens → rows of a file of saved features, by passes of the base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.data.rows import IGNORED, Collator
from specheads.decoding.target.hf_base import text_config
from specheads.losses.chunked import rows_of_chunk
from specheads.losses.teacher import LastHidden, TopKTail, WholeLogits, gives_logits, packed_mask
from specheads.training.features.forward import Forward
from specheads.training.features.index import Index, kept_tokens
from specheads.training.features.shards import FeatureError, stored


class Writer:
    """Rows of tokens → rows of a file, by passes of the base."""

    def __init__(self, base: PreTrainedModel, index: Index) -> None:
        self.base, self.index = base, index
        if index.law == "hidden" and not gives_logits(base):
            raise FeatureError(
                f"{type(base).__name__} does more than its output matrix between the last hidden state and the logits, "
                "so that state does not give its law; save that itself, with --law topk:64"
            )
        self.forward = Forward(base, index.taps, needs_law=index.law != "none")
        self.collator, self.kept = Collator(index.pad_token_id), kept_tokens(index.law)
        self.dtype = getattr(torch, index.dtype)

    def shard(self, rows: Sequence[dict[str, list[int]]]) -> list[dict[str, Tensor]]:
        """In the order given; passes take rows of like length together."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        made: dict[int, dict[str, Tensor]] = {}
        for start in range(0, len(order), self.index.batch_size):
            batch = order[start : start + self.index.batch_size]
            made |= zip(batch, self._pass([rows[i] for i in batch]), strict=True)
        return [made[i] for i in range(len(rows))]

    @torch.no_grad()
    def _pass(self, rows: Sequence[dict[str, list[int]]]) -> Iterator[dict[str, Tensor]]:
        batch = {name: t.to(self.base.device) for name, t in self.collator(rows).items()}
        documents, positions = batch["document_ids"], batch["position_ids"]
        packed = bool((documents > 1).any())
        mask = packed_mask(self.base, documents, positions) if packed else batch["attention_mask"]
        features, teacher = self.forward(batch["input_ids"], mask, positions)
        parts = features.chunk(len(self.index.taps), -1)
        states = {f"tap_{k}": part for k, part in zip(self.index.taps, parts, strict=True)}
        law: dict[str, Tensor] = {}
        if self.kept is not None:
            assert isinstance(teacher, LastHidden | WholeLogits)
            law = self._law(teacher, batch)
        elif self.index.law == "hidden" and self.index.last_tap is None:
            assert isinstance(teacher, LastHidden)
            states["last_hidden"] = teacher.hidden.unflatten(0, documents.shape)
        supervised = (batch["labels"] != IGNORED) & (documents > 0)
        plain = {
            "input_ids": batch["input_ids"], "document_ids": documents, "position_ids": positions,
            "supervised": supervised, **law,
        }  # fmt: skip
        for b, row in enumerate(rows):
            here = slice(0, len(row["input_ids"]))
            one = {name: t[b, here].cpu() for name, t in plain.items()}
            for name, t in states.items():
                one |= stored(name, t[b, here], self.dtype)
            yield one

    def _law(self, teacher: LastHidden | WholeLogits, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The likeliest tokens at the positions that are asked for, those before a supervised token; 0 elsewhere."""
        asked = torch.zeros_like(batch["labels"], dtype=torch.bool)
        asked[:, :-1] = batch["labels"][:, 1:] != IGNORED
        places = asked.flatten().nonzero().squeeze(1)
        assert self.kept is not None
        size = rows_of_chunk(text_config(self.base).vocab_size, places.device)
        found = [TopKTail.from_logits(teacher.logits_at(part), self.kept) for part in places.split(size)]
        made = {}
        for name, field in (("law_ids", "ids"), ("law_log_p", "log_p"), ("law_tail", "tail")):
            values = torch.cat([getattr(part, field) for part in found])
            scatter_by_start = values.new_zeros(asked.numel(), *values.shape[1:])
            scatter_by_start[places] = values
            made[name] = scatter_by_start.unflatten(0, asked.shape)
        return made
