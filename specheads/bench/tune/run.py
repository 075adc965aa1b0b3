"""Measures step costs on this machine, as a table for automatic drafts."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from specheads.bench.tune.compiled import tune_compiled
from specheads.bench.tune.eager import tune_eager
from specheads.bench.tune.timing import TuneConfig
from specheads.decoding.planner.by_cost import CostTable
from specheads.heads import DraftHead
from specheads.models.costs import cost_key
from specheads.terminal import Report

_log = logging.getLogger(__name__)


@torch.inference_mode()
def tune(base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, report: Report | None = None) -> CostTable:
    """Measure the step costs of a base, and of its head if any, for one batch size. Takes seconds to minutes."""
    measure = tune_compiled if config.compile else tune_eager
    costs = measure(base, head, config, report)
    names = {"base": str(base.name_or_path), "head": "none" if head is None else head.config.kind}
    key = cost_key(base, head, compiled=bool(config.compile))
    return CostTable(key, {config.batch: costs}, title="measured", names=names)


def merge(old: CostTable | None, new: CostTable) -> CostTable:
    """The new costs, plus the acceptance and other batch sizes' costs of an older table with the same key. Costs that
    other versions measured are dropped, with a line in the log."""
    if old is None or old.key != new.key:
        return new
    kept = old.batches if old.versions == new.versions else {}
    if dropped := sorted(old.batches.keys() - kept.keys() - new.batches.keys()):
        _log.warning(
            "dropped the costs of batch %s, measured with %s, and this is %s: run `specheads tune --batch` again",
            ", ".join(map(str, dropped)), old.measured_with, new.measured_with,
        )  # fmt: skip
    return replace(new, batches={**kept, **new.batches}, acceptance=new.acceptance or old.acceptance)
