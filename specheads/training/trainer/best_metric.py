"""Refuses a metric_for_best_model that the held-out rows or the head cannot give, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from specheads.data.rows import IGNORED
from specheads.decoding.planner import StaticTree
from specheads.losses.metrics import AcceptanceMeter
from specheads.losses.targets import ENDED, tokens_left
from specheads.training.trainer.rows import RowCollator

_OURS = re.compile(
    r"(accepted_length(_error|_sampled|_tree)?|(accuracy|conditional_accuracy|acceptance|loss)_depth_\d+)$"
)


def refuse_absent_metric(args: TrainingArguments, held_out: Any, depths: int, tree: StaticTree | None) -> None:
    """ValueError if an evaluation of the held-out rows, or sets of rows by name, cannot have the metric. depths: scored
    by the head; tree: see AcceptanceMeter. Rows that do not show what is learnt, such as a stream's, are not looked at.
    """
    if (metric := args.metric_for_best_model) is None or held_out is None:
        return
    name = metric.removeprefix("eval_")
    sets = {f"{key}_": rows for key, rows in held_out.items()} if isinstance(held_out, dict) else {"": held_out}
    prefix = next((prefix for prefix in sets if prefix and name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    if not _OURS.match(name) or (rows := sets.get(prefix)) is None or (left := most_left(rows, depths + 1)) is None:
        return
    known = _metrics(left, depths, tree, batches=2 if len(rows) > args.eval_batch_size * args.world_size else 1)
    if name in known:
        return
    longest = f"the longest held-out answer has {left + 1} tokens to learn, and " if left <= depths else ""
    raise ValueError(
        f"training.metric_for_best_model={metric}: the evaluation would not have it, only {', '.join(known)}; {longest}"
        "accepted_length needs an answer of 2, and a figure of depth k one of k + 2 and a head that drafts as deep: "
        "give other held-out rows, or metric_for_best_model=loss"
    )


def _metrics(left: int, depths: int, tree: StaticTree | None, batches: int) -> list[str]:
    names = ["loss", *(f"loss_depth_{k}" for k in range(1, depths + 1))]
    if not left:
        return names
    meter, depth = AcceptanceMeter(tree), torch.arange(depths).unsqueeze(0)
    for _ in range(batches):
        meter.add(torch.where(depth >= left - 1, ENDED, 0), torch.ones(1, depths))
    return [*names, *meter.compute()]


def most_left(rows: Any, enough: int) -> int | None:
    """The most tokens of an answer that a decoding step could gain in these rows, or `enough`; None if unknown."""
    most = 0
    for row in _labelled(rows):
        if row is None:
            return None
        most = max(most, _left(row))
        if most >= enough:
            return enough
    return most


def _labelled(rows: Any) -> Iterable[Mapping[str, Any] | None]:
    if hasattr(rows, "labels"):  # saved features, whose rows are large
        return ({"input_ids": row["labels"], **row} for row in rows.labels())
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        return [None]
    return (row if _tells(row) else None for row in map(rows.__getitem__, range(len(rows))))


def _tells(row: Any) -> bool:
    return isinstance(row, Mapping) and (row.get("labels") is not None or row.get("loss_mask") is not None)


def _left(row: Mapping[str, Any]) -> int:
    if not len(row["input_ids"]):
        return 0
    batch = RowCollator(0)([row])
    return int(tokens_left(batch["labels"] != IGNORED, batch["document_ids"]).max())
