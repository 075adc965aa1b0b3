"""Texts of the target in a file, and decoders whose drafts are reviewed against them without a pass of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from specheads.bench.decoders import counts
from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation.hf_options import NEUTRAL
from specheads.decoding.generation.recorded import Record, record, replay, sum_columns
from specheads.decoding.planner import Plan
from specheads.models.base.fingerprint import differences, fingerprint_base

logger = logging.get_logger(__name__)


def record_of(path: Path, base: PreTrainedModel, prompts: Sequence[Sequence[int]], length: int) -> Record:
    """The target's greedy texts in a file, which is first generated if it is missing."""
    if not path.exists():
        replace(record(base, prompts, length, **NEUTRAL), base=fingerprint_base(base)).save(path)
    return load_record(path, base, length)


def load_record(path: Path, base: PreTrainedModel, length: int | None = None) -> Record:
    """The texts in a record, cut to `length` tokens each (None: uncut). ValueError if it is of another target or its
    texts are shorter; a warning if it does not name its target."""
    known, current = Record.load(path), fingerprint_base(base)
    if known.base is None:
        logger.warning(
            "%s does not say which target it is of: it must be %s; delete or rename it, and it is recorded again",
            path, base.name_or_path,
        )  # fmt: skip
    differing = differences(current, known.base or {})
    try:
        if differing or known.vocab_size != current["vocab_size"]:
            names = ", ".join(differing or ["vocab_size"])
            raise ValueError(f"it is of another target than {base.name_or_path}, with other {names}")
        return known if length is None else known.cut(length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; delete or rename the file, and it is recorded again") from error


def replayed(known: Record, drafter: Drafter | None, plan: Plan | None, device: torch.device) -> Decoder:
    """A decoder whose drafts are reviewed against recorded texts, without a pass of the target."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        prompts = [ids[mask.bool()].tolist() for ids, mask in rows]
        if drafter is None:
            texts = [list(known.outputs[tuple(prompt)]) for prompt in prompts]
            gains = [[1] * len(text) for text in texts]
            return Output(texts, counts(gains), gains, accepted=[[0] * len(text) for text in texts])
        chain = plan or drafter.default_plan(device, False)
        steps, reviews = [], []
        for prompt in prompts:
            steps.append(list(replay(known, prompt, drafter, chain, device)))
            reviews.append(drafter.reviews if len(steps[-1]) > 1 else ())
        gains = [[len(step.tokens[0]) for step in row] for row in steps]
        passes = {"draft_reviews": sum_columns(reviews)} if any(reviews) else {}
        texts = [[token for step in row for token in step.tokens[0]] for row in steps]
        return Output(
            texts, counts(gains) | passes, gains, accepted=[[step.accepted[0] for step in row] for row in steps]
        )

    return run
