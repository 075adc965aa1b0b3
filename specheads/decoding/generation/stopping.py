"""Where rows stop: Hugging Face's stopping criteria, applied as decode() runs.

Shapes: B batch rows, T prompt columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specheads.decoding.loop import Step


@dataclass
class Stopping:
    """Hugging Face's stopping criteria as decode()'s `stop`.

    prompts: each row as Hugging Face has it, padding included, `columns` wide; lengths: without padding. Read from the
    criteria are eos, the ids that end a row, and limit, the most new tokens. ValueError if they hold no length limit.

    Criteria of transformers look at one row, and are applied to each row by itself. Those of users may look at the
    whole batch, and remember it, so they are called as transformers would call them: once for each column, with all
    rows, when each running row has reached it. What a row ahead of the others wrote past its end is dropped.

    texts: the new tokens of each row; ends: for each row that has stopped, how many of them count; asked: how many
    columns users' criteria have seen; ids (B, T + asked): those columns, after the prompts.
    """

    criteria: StoppingCriteriaList
    prompts: list[list[int]]
    columns: int
    lengths: list[int]
    pad_id: int
    device: torch.device
    eos: set[int] = field(default_factory=set)
    limit: int = 0
    row_criteria: list[Any] = field(default_factory=list)
    user_criteria: list[Any] = field(default_factory=list)
    texts: list[list[int]] = field(init=False)
    ids: torch.Tensor = field(init=False)
    ends: dict[int, int] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        limits = []
        for criterion in self.criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.eos |= set(criterion.eos_token_id.tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                limits.append(criterion.max_length)
            elif isinstance(criterion, StopStringCriteria | MaxTimeCriteria):
                self.row_criteria.append(criterion)
            else:
                self.user_criteria.append(criterion)
        if not limits:
            raise ValueError("generation has no length limit; give max_new_tokens or max_length")
        self.limit = max(1, math.ceil(min(limits)) - self.columns)  # transformers takes fractions too
        self.texts = [[] for _ in self.prompts]
        self.ids = torch.tensor(self.prompts, device=self.device)

    def __call__(self, row: int, ids: list[int], count: int) -> int:
        new = ids[self.lengths[row] :]
        self.texts[row], before = new, len(new) - count
        for end in () if row in self.ends else range(before + 1, len(new) + 1):
            if new[end - 1] in self.eos or end >= self.limit or self._row_ends(row, end):
                self._end(row, end)
                break
        if self.user_criteria:
            self._ask_users()
        return max(0, self.ends[row] - before) if row in self.ends else -1

    def _row_ends(self, row: int, end: int) -> bool:
        """Does one of transformers' own criteria end this row after so many new tokens?"""
        if not self.row_criteria:
            return False
        ids = torch.tensor([self.prompts[row] + self.texts[row][:end]], device=self.device)
        return any(bool(criterion(ids, None)) for criterion in self.row_criteria)

    def _ask_users(self) -> None:
        """Call users' criteria for each further column that all running rows have reached."""
        while self.asked < max(self.ends.get(row, self.limit) for row in range(len(self.texts))):
            column = self.asked + 1
            kept = [min(column, self.ends.get(row, column)) for row in range(len(self.texts))]
            if any(len(text) < count for text, count in zip(self.texts, kept, strict=True)):
                return
            self.asked = column
            new = [text[column - 1] if count == column else self.pad_id
                   for text, count in zip(self.texts, kept, strict=True)]  # fmt: skip
            self.ids = torch.cat([self.ids, self.ids.new_tensor(new).unsqueeze(1)], 1)
            done = torch.zeros(len(new), dtype=torch.bool)
            for criterion in self.user_criteria:  # many return a Python bool, which transformers takes for all rows
                done = done | torch.as_tensor(criterion(self.ids, None)).cpu()
            for row in done.nonzero().flatten().tolist():
                self._end(row, column)

    def _end(self, row: int, end: int) -> None:
        self.ends[row] = min(end, self.ends.get(row, end))


def cut_row(step: Step, row: int, count: int) -> None:
    """Keep only the first `count` tokens that this row gained; at 0 it counts as not having taken part in the step."""
    del step.tokens[row][count:]
    step.accepted[row] = min(step.accepted[row], count)
    for accepted in (step.ranks, step.path):
        if accepted:
            del accepted[row][step.accepted[row] :]
    if count == 0:
        step.drafted[row] = 0
        for of_nodes in (step.divergences, step.parents):
            if of_nodes:
                of_nodes[row].clear()
