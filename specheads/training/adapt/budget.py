"""A budget of minutes, tokens or epochs, by which the learning rate falls and at which training ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from specheads.files import replacing

_WARMUP = 0.05  # share of the budget in which the learning rate rises
_LAST = 0.1  # of the peak learning rate, at the end


class Budget(TrainerCallback):
    """Ends training when the first of these is spent: `seconds` of training, `tokens` of input, the steps of the run.

    spent: the file that keeps the seconds over stops, written with each checkpoint.
    """

    def __init__(self, seconds: float, tokens: float, spent: Path) -> None:
        self.seconds, self.tokens, self.spent = seconds, tokens, spent
        self.earlier = json.loads(spent.read_text("utf8"))["seconds"] if spent.is_file() else 0.0
        self.began, self.done = time.monotonic(), 0.0

    def taken(self) -> float:
        """Seconds of training so far."""
        return self.earlier + time.monotonic() - self.began

    def share(self, state: Any) -> float:
        """How much of the budget is spent, from 0 to 1."""
        steps = state.global_step / state.max_steps if state.max_steps > 0 else 0.0
        return min(1.0, max(steps, self.taken() / self.seconds, state.num_input_tokens_seen / self.tokens))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()
        self.done = self.share(state)

    def factor(self, step: int) -> float:
        """The learning rate as a share of its peak, for torch's LambdaLR: the budget counts, not the step."""
        return min((self.done + 0.01) / _WARMUP, 1 - (1 - _LAST) * self.done)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.done = self.share(state)
        if self.done >= 1:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with replacing(self.spent) as path:
            path.write_text(json.dumps({"seconds": self.taken(), "tokens": int(state.num_input_tokens_seen)}), "utf8")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)
