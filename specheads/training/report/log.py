"""What a run prints: a line per log, a table per evaluation; above the progress bar on a terminal, plain elsewhere.

Trackers and trainer_state.json get every metric. These are the ones that show whether a head learns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import has_length

from specheads import terminal
from specheads.terminal import clock_time

_LINE_LEGEND = (
    "accepted length: tokens a step, estimated from the training batches (greedy chains of {depths}, the base's own "
    "token included); tokens/s: supervised ones"
)
_TABLE_LEGEND = (
    "accepted length: tokens a step, the base's own included; accuracy at depth k: how often the k-th draft's first "
    "choice is the base's"
)
_UNPRINTED = ("epoch", "total_flos", "step")


class Pace:
    """Supervised tokens per second since the last line, and the remaining time. Evaluations and checkpoints count for
    the second only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.tokens = 0  # since the last line; the trainer adds them
        self._began = self._since = self._step_ended = clock()
        self._first = 0
        self._lost = 0.0
        self._whole = self._interrupted = False

    def begin(self, step: int) -> None:
        """Start timing a run at step `step`. If that is a resumption, the first rate is unknown."""
        self._began = self._since = self._step_ended = self.clock()
        self._first, self._lost, self._whole, self._interrupted = step, 0.0, step == 0, False

    def step_begins(self) -> None:
        if self._interrupted:
            self._lost += self.clock() - self._step_ended
            self._interrupted = False

    def step_ends(self) -> None:
        self._step_ended = self.clock()

    def interrupt(self) -> None:
        self._interrupted = True

    def rate(self) -> float | None:
        """Tokens per second since the last call of rate(); None if unknown."""
        now = self.clock()
        seconds, tokens, whole = now - self._since - self._lost, self.tokens, self._whole
        self._since, self._lost, self.tokens, self._whole = now, 0.0, 0, True
        return tokens / seconds if whole and tokens and seconds > 0 else None

    def left(self, step: int, last: int) -> float | None:
        """Seconds until step `last` at the average speed so far; None if unknown."""
        done = step - self._first
        return (self.clock() - self._began) / done * (last - step) if done > 0 and last >= step else None


def log_line(logs: Mapping[str, Any], step: int, last: int, rate: float | None, left: float | None) -> str:
    """One log of training: `step 20/300  loss 7.12  lr 4.00e-03  accepted length 1.23  …`."""
    parts = [f"step {step:>{len(str(last))}}/{last}", f"loss {float(logs['loss']):.3f}"]
    if (lr := logs.get("learning_rate")) is not None:
        parts.append(f"lr {float(lr):.2e}")
    if (length := logs.get("accepted_length")) is not None:
        parts.append(f"accepted length {float(length):.2f}")
    if rate is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if left is not None:
        parts.append(f"{clock_time(left)} left")
    return "  ".join(parts)


def evaluation_prefix(logs: Mapping[str, Any]) -> str | None:
    """`eval_`, or `eval_NAME_` for one of several held-out sets; None if the log is not an evaluation's."""
    prefixes = (name.removesuffix("runtime") for name in logs if name.startswith("eval_") and name.endswith("_runtime"))
    return next(prefixes, None)


def evaluation_table(logs: Mapping[str, Any], history: Sequence[Mapping[str, Any]], step: int) -> str:
    """A table of an evaluation's metrics next to those of the last one at an earlier step; history: the run's log."""
    prefix = evaluation_prefix(logs)
    assert prefix is not None
    earlier = [e for e in history if f"{prefix}runtime" in e and e["step"] < step]
    before: Mapping[str, Any] = earlier[-1] if earlier else {}
    rows = []
    for name, label, digits in evaluation_rows(logs, prefix):
        now, then = float(logs[name]), before.get(name)
        cells = [label, f"{now:.{digits}f}"]
        if before:
            cells += ["–", "–"] if then is None else [f"{then:.{digits}f}", f"{now - then:+.{digits}f}"]
        rows.append(cells)
    seconds, count = float(logs[f"{prefix}runtime"]), logs.get(f"{prefix}rows", 0)
    name = prefix.removeprefix("eval_").removesuffix("_")
    title = f"evaluation at step {step}: {f'{name}, ' if name else ''}{count} held-out rows"
    columns = ["", f"step {step}", *([f"step {before['step']}", "change"] if before else [])]
    shown = terminal.as_text(terminal.table(f"{title}, {seconds:.1f} s", columns, rows))
    return "\n".join(["", *filter(None, shown.splitlines()), ""])  # blank lines around it, none within


def evaluation_rows(logs: Mapping[str, Any], prefix: str) -> list[tuple[str, str, int]]:
    """The metrics of an evaluation to show: name, label and digits."""
    depths = 0
    while f"{prefix}accuracy_depth_{depths + 1}" in logs:
        depths += 1
    shown = [
        ("loss", "loss", 3),
        ("accepted_length_tree", "accepted length, the head's tree", 2),
        ("accepted_length", f"accepted length, chain of {depths}", 2),
        ("accepted_length_sampled", f"accepted length, chain of {depths}, sampled (T = 1)", 2),
        *((f"accuracy_depth_{k}", f"accuracy at depth {k}", 3) for k in range(1, depths + 1)),
    ]
    return [(prefix + name, label, digits) for name, label, digits in shown if prefix + name in logs]


def summary_line(logs: Mapping[str, Any], steps: int) -> str:
    """A line for the log at the end of training, or for any other log."""
    if "train_runtime" in logs:
        loss = f", mean loss {float(logs['train_loss']):.3f}" if "train_loss" in logs else ""
        return f"trained: {steps} steps in {clock_time(float(logs['train_runtime']))}{loss}"
    shown = {name: value for name, value in logs.items() if name not in _UNPRINTED}
    return "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in shown.items())  # fmt: skip


class _Lines(TrainerCallback):
    """Logs as lines; each legend is printed once, with the first line it explains."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace
        self._explained: set[str] = set()

    def lines(self, state: Any, logs: Mapping[str, Any]) -> list[str]:
        step = state.global_step
        if "loss" in logs:
            line = log_line(logs, step, state.max_steps, self.pace.rate(), self.pace.left(step, state.max_steps))
            depths = sum(name.startswith("accuracy_depth_") for name in logs)
            legend = _LINE_LEGEND.format(depths=f"{depths} draft{'s' if depths != 1 else ''}") if depths else ""
            return [*self._once(legend), line]
        if evaluation_prefix(logs) is not None:
            return [evaluation_table(logs, state.log_history, step), *self._once(_TABLE_LEGEND)]
        line = summary_line(logs, step)
        return [line] if line else []

    def _once(self, legend: str) -> list[str]:
        if not legend or legend in self._explained:
            return []
        self._explained.add(legend)
        return [legend]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.pace.begin(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self.pace.step_ends()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        self.pace.interrupt()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pace.interrupt()


class AcceptanceLog(_Lines, PrinterCallback):
    """Plain lines on stdout; one every few seconds of an evaluation."""

    batches = 0  # of the evaluation so far

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        now = self.pace.clock()
        if not self.batches:
            self._evaluation_began = self._printed = now
        self.batches += 1
        if now - self._printed >= terminal.LOG_EVERY and state.is_world_process_zero and has_length(eval_dataloader):
            self._printed, count = now, len(eval_dataloader)
            left = (now - self._evaluation_began) / self.batches * (count - self.batches)
            print(f"evaluation {self.batches / count:.0%}  {clock_time(left)} left", flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        self.batches = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and state.is_world_process_zero:
            for line in self.lines(state, logs):
                print(line, flush=True)


class AcceptanceProgress(_Lines, ProgressCallback):
    """transformers' progress bar, and the lines above it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and state.is_world_process_zero:
            write = print if self.training_bar is None else self.training_bar.write
            for line in self.lines(state, logs):
                write(line)


def printer_for(callback: Any, pace: Pace) -> TrainerCallback | None:
    """Our replacement for transformers' printing callbacks, with a bar only on terminals; None for other callbacks."""
    if type(callback) is ProgressCallback and sys.stderr.isatty():
        return AcceptanceProgress(pace)
    return AcceptanceLog(pace) if type(callback) in (ProgressCallback, PrinterCallback) else None
