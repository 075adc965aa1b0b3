"""How much a run does: its steps, and evaluations and a parity gate that take at most a share of their time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specheads.training.recipe.arguments import SpecTrainingArguments

MIN_ROWS = 8  # that an evaluation may always have
MIN_SECONDS = 30.0  # that the parity gate may always take


@dataclass(frozen=True)
class Budget:
    """rows, held_out: how many there are; steps, of `batch` rows over all processes; evaluations: during training and
    after it, each of `evaluated` held-out rows."""

    rows: int
    held_out: int
    batch: int
    steps: int
    evaluations: int
    evaluated: int

    @classmethod
    def of(
        cls, training: Mapping[str, Any], rows: int, held_out: int, share: float | None, processes: int = 1
    ) -> Budget:
        """training: options of SpecTrainingArguments; share: of the rows trained on that all evaluations together may
        have, None for no bound."""

        def option(name: str) -> Any:
            return training.get(name, getattr(SpecTrainingArguments, name))

        accumulated = option("gradient_accumulation_steps")
        rows_at_once = option("per_device_train_batch_size") * processes
        per_epoch = max(1, math.ceil(math.ceil(rows / rows_at_once) / accumulated))
        steps = option("max_steps") if option("max_steps") > 0 else math.ceil(option("num_train_epochs") * per_epoch)
        strategy = str(getattr(option("eval_strategy"), "value", option("eval_strategy")))
        every = {"steps": option("eval_steps") or option("logging_steps"), "epoch": per_epoch}.get(strategy, steps)
        every = math.ceil(steps * every) if every < 1 else every
        evaluations = math.ceil(steps / every) if held_out else 0
        batch, evaluated = rows_at_once * accumulated, held_out
        if share is not None and evaluations:
            evaluated = min(held_out, max(MIN_ROWS, int(share * steps * batch / evaluations)))
        return cls(rows, held_out, batch, steps, evaluations, evaluated)

    def select(self, held_out: Any) -> Any:
        """The rows to evaluate, spread evenly over the held-out ones."""
        if self.evaluated == self.held_out:
            return held_out
        return held_out.select([i * self.held_out // self.evaluated for i in range(self.evaluated)])


def gate_seconds(share: float | None, training: float) -> float:
    """How long the parity gate may take after so many seconds of training."""
    return math.inf if share is None else max(MIN_SECONDS, share * training)
