"""Why a training run ended early, in one line: what has been saved, and how to resume."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specheads.options import reason

_log = logging.getLogger(__name__)

STATE = "trainer_state.json"


class TrainingError(RuntimeError):
    """A run that could not continue. What it has saved is intact; the message names the checkpoint to resume from."""


class TrainingStopped(KeyboardInterrupt):
    """A run that was asked to stop, by Ctrl-C or SIGTERM; number: the signal's.

    The message, on the first process only, says at which step it stopped and how to resume.
    """

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """In the block the first SIGINT or SIGTERM raises TrainingStopped, and later ones are ignored: a terminal and a
    launcher may both send one, and the second would cut the first one's message short."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}
    # Only the main thread receives signals; one that is ignored already, as in a background shell job, stays ignored.
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in signals if is_main and before[number] not in (None, signal.SIG_IGN)]

    def stop(number: int, frame: Any) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        raise TrainingStopped(number=number)

    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def is_finished(folder: Path) -> bool:
    """Whether this checkpoint is complete. Its state is written last, so after a crash it is missing or truncated."""
    try:
        return isinstance(json.loads((folder / STATE).read_text("utf8")), dict)
    except (OSError, ValueError):
        return False


def step_of(checkpoint: Path) -> int:
    """The step at which the checkpoint was written."""
    return int(json.loads((checkpoint / STATE).read_text("utf8"))["global_step"])


def last_finished(output_dir: Any, since: float = 0.0) -> Path | None:
    """The newest complete checkpoint of a run; since: written no earlier than this time.time()."""
    numbered = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in Path(output_dir).glob("checkpoint-*")
        if folder.name.rpartition("-")[2].isdigit()
    }
    whole = (numbered[step] for step in sorted(numbered, reverse=True) if is_finished(numbered[step]))
    return next((folder for folder in whole if (folder / STATE).stat().st_mtime >= since), None)


def resume_hint(output_dir: Any) -> str:
    """How to resume, as the end of a message."""
    folder = last_finished(output_dir)
    if folder is None:
        return "no checkpoint was saved before it (training.save_steps says how often)"
    if holds_head_alone(folder):
        return f"{folder} holds the head alone (training.save_only_model=true): {begin_from_head(folder)}"
    return f"{folder} is whole: resume from it with training.resume_from_checkpoint=auto"


def holds_head_alone(checkpoint: Path) -> bool:
    """Whether training.save_only_model=true left out what a run needs to resume, such as random states."""
    return not any(checkpoint.glob("rng_state*.pth"))


def begin_from_head(checkpoint: Path) -> str:
    return f"begin a new run from its head: head=null init_from={checkpoint}"


def stop_message(step: int, output_dir: Any, since: float, resumed_from: Any, head_saved: bool) -> str:
    """What a stopped run leaves. since: when it began; resumed_from: the checkpoint it began from, if any; head_saved:
    training had finished, and something after it was stopped."""
    if head_saved:
        return f"stopped after step {step}, the last; the head is saved in {output_dir}"
    folder = last_finished(output_dir, since) or (Path(resumed_from) if resumed_from else None)
    if folder is None:
        return (
            f"stopped at step {step}; no checkpoint was saved yet (training.save_strategy and training.save_steps say "
            "when one is)"
        )
    if holds_head_alone(folder):
        return (
            f"stopped at step {step}; checkpoint {folder}, of the head alone (training.save_only_model=true); "
            f"{begin_from_head(folder)}"
        )
    point = "auto" if folder == last_finished(output_dir) else folder
    return (
        f"stopped at step {step}; checkpoint {folder}; resume with the same command and "
        f"training.resume_from_checkpoint={point}"
    )


@contextlib.contextmanager
def writing(path: Path, output_dir: Any) -> Iterator[None]:
    """In the block a failure to write a file, such as a full disk, is a TrainingError; path: what was to be written."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save raises a RuntimeError, whose text differs between versions.
        if isinstance(error, TrainingError) or is_lost_process(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise TrainingError(
            f"{path} could not be written ({reason}); once there is room, start again; {resume_hint(output_dir)}"
        ) from error


@contextlib.contextmanager
def sparing_the_head(name: str, failed: list[str], saved: Any) -> Iterator[None]:
    """In the block an error is logged in one line, and `name` noted in `failed`: it costs neither the head, saved in
    `saved`, nor what follows. Each name is logged once."""
    try:
        yield
    except Exception as error:
        if is_lost_process(error):
            raise
        if name not in failed:
            failed.append(name)
            _log.error("%s failed (%s: %s); the head is saved in %s", name, type(error).__name__, reason(error), saved)


def is_lost_process(error: BaseException) -> bool:
    """Whether the error means that another process of this run ended, or did not answer in time."""
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "timeout caused pair closure")
    return isinstance(error, torch.distributed.DistError) or any(sign in str(error) for sign in signs)
