"""Where rows stop: Hugging Face's stopping criteria, applied as decode() runs.

Shapes: B batch rows, T prompt columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specheads.decoding.results import Step


@dataclass
class Stopping:
    """Hugging Face's stopping criteria as decode()'s `stop`.

    prompts: each row as Hugging Face has it, padding included, `columns` wide; lengths: without padding. Read from the
    criteria are eos, the ids that end a row, and limit, the most new tokens. ValueError if they hold no length limit.

    Criteria of transformers look at one row, and are applied to each row by itself. Those of users may look at the
    whole batch, and remember it, so they are called as transformers would call them: once for each column, with all
    rows, when each running row has reached it. What a row ahead of the others wrote past its end is dropped.
    gives_scores: they are given the scores of all columns so far, zeros where a row has ended; else None.

    texts: the new tokens of each row; ends: for each row that has stopped, how many of them count; asked: how many
    columns users' criteria have seen; ids (B, T + asked): those columns, after the prompts; scores: of those columns,
    (B, V) each. row_scores: of the new tokens of each row, (V,) each.
    """

    criteria: StoppingCriteriaList
    prompts: list[list[int]]
    columns: int
    lengths: list[int]
    pad_id: int
    device: torch.device
    gives_scores: bool = False
    eos: set[int] = field(default_factory=set)
    limit: int = 0
    row_criteria: list[Any] = field(default_factory=list)
    user_criteria: list[Any] = field(default_factory=list)
    texts: list[list[int]] = field(init=False)
    ids: Tensor = field(init=False)
    row_scores: list[list[Tensor]] = field(init=False)
    scores: tuple[Tensor, ...] | None = field(init=False)
    ends: dict[int, int] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        limits = []
        for criterion in self.criteria:
            kind = type(criterion)  # a user's subclass may do more
            if kind is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif kind is MaxLengthCriteria:
                limits.append(criterion.max_length)
            elif kind in (StopStringCriteria, MaxTimeCriteria):
                self.row_criteria.append(criterion)
            else:
                self.user_criteria.append(criterion)
        limits = [limit for limit in limits if math.isfinite(limit)]
        if not limits:
            raise ValueError("generation has no length limit; give max_new_tokens or max_length")
        self.limit = max(1, math.ceil(min(limits)) - self.columns)  # transformers takes fractions too
        self.texts = [[] for _ in self.prompts]
        self.ids = torch.tensor(self.prompts, device=self.device)
        self.row_scores = [[] for _ in self.prompts]
        self.scores = () if self.gives_scores and self.user_criteria else None

    def __call__(self, row: int, ids: list[int], count: int, scores: Sequence[Tensor] = ()) -> int:
        """As decode() calls it. scores: the processed scores (V,) of the `count` new tokens, if it keeps them."""
        new = ids[self.lengths[row] :]
        if self.scores is not None:
            self.row_scores[row] += scores
        self.texts[row], before = new, len(new) - count
        for end in () if row in self.ends else range(before + 1, len(new) + 1):
            if new[end - 1] in self.eos or end >= self.limit or self._row_ends(row, end):
                self._end(row, end)
                break
        if self.user_criteria:
            with torch.inference_mode(False), torch.no_grad():  # as in transformers: tensors that may be kept
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
            if self.scores is not None:
                self.scores += (self._scores_of(column, kept),)
            done = torch.zeros(len(new), dtype=torch.bool)
            for criterion in self.user_criteria:  # many return a Python bool, which transformers takes for all rows
                done = done | torch.as_tensor(criterion(self.ids, self.scores)).cpu()
            for row in done.nonzero().flatten().tolist():
                self._end(row, column)

    def _scores_of(self, column: int, kept: Sequence[int]) -> Tensor:
        """(B, V) the scores of a column, as `scores` of the output has them: zeros for rows that have ended."""
        last = [scores[count - 1] for scores, count in zip(self.row_scores, kept, strict=True)]
        return torch.stack(
            [one if count == column else torch.zeros_like(one) for one, count in zip(last, kept, strict=True)]
        ).float()

    def _end(self, row: int, end: int) -> None:
        self.ends[row] = min(end, self.ends.get(row, end))


def gives_scores(config: GenerationConfig) -> bool:
    """Does transformers give stopping criteria the scores under this config?"""
    return bool(config.return_dict_in_generate and config.output_scores)


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
