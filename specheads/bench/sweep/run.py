"""Runs all settings of a sweep, in one process or several. Finished settings are saved and not measured again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from specheads.bench.figures.identity import identify_machine
from specheads.bench.figures.results import NOTHING_DONE, RESULTS, Results, digest
from specheads.bench.sweep.drafters import Bench
from specheads.bench.sweep.grid import PLAIN, Setting, Sweep
from specheads.bench.sweep.measure import Row, measure, prompts_of, replay
from specheads.bench.sweep.tasks import Task, load_task
from specheads.decoding.generation.hf_options import NEUTRAL
from specheads.decoding.generation.recorded import Record, record
from specheads.models.base.fingerprint import differences, fingerprint_base
from specheads.terminal import Report

logger = logging.get_logger(__name__)
FORMAT = 5  # version of the rows; rows of another version are measured again


def key_of(setting: Setting, common: str) -> str:
    """A digest of one setting and of `common`, which the settings of a sweep share."""
    # Fields with default values are left out, so that a new field does not invalidate finished settings.
    fields = {f.name: getattr(setting, f.name) for f in dataclasses.fields(setting)}
    given = {f.name: fields[f.name] for f in dataclasses.fields(setting) if fields[f.name] != f.default}
    return digest(given, common)


def common_of(bench: Bench, sweep: Sweep, task: Task, workers: int = 1) -> str:
    """A digest of all else that a row depends on: the models, prompts, answers, lengths and machine."""
    prompts = prompts_of(bench, sweep, task)
    answers = [question.answer for question in task.questions]
    length = sweep.max_new_tokens or task.max_new_tokens
    shared = [
        bench.identity(), prompts, answers, length, sweep.repeats, sweep.speed_prompts, sweep.clock, sweep.batch_size,
        sweep.seed, task.name, FORMAT,
        # Workers share the CPU's threads, caches and memory, and have one GPU each.
        {**identify_machine(bench.base.device.type), "torch_threads": threads_of(workers)},
        *([workers] if workers > 1 else []),
    ]  # fmt: skip
    if sweep.k_matrices:
        shared.append([sweep.leniency, sweep.notation, sweep.cost])
    return digest(*shared)


def threads_of(workers: int) -> int:
    """The number of torch threads in each of `workers` processes."""
    return max(1, torch.get_num_threads() // workers)


def complete(
    results: Results, settings: Sequence[Setting], common: str,
    measured: Callable[[list[Setting], Callable[[float, str], None]], Iterable[tuple[Setting, Row]]], tell: Report,
) -> list[Row]:  # fmt: skip
    """The row of each setting, in order: from `results` if present, else from `measured`, which is given the remaining
    settings and a function to report progress. KeyboardInterrupt says how many are done."""
    keys = {setting: key_of(setting, common) for setting in settings}
    left = [setting for setting in settings if keys[setting] not in results.rows]
    done = len(settings) - len(left)

    def within(fraction: float, note: str) -> None:
        tell(min((done + fraction) / len(settings), 0.999), f"{done} of {len(settings)} done; {note}")

    try:
        for setting, row in measured(left, within) if left else ():
            results.add(keys[setting], row)
            done += 1
            within(0.0, str(setting))
    except KeyboardInterrupt:
        after = f"after {done} of {len(settings)} settings; the same command resumes"
        raise KeyboardInterrupt(after if done else NOTHING_DONE) from None
    tell(1.0, f"{len(settings)} settings")
    return [results.rows[key] for key in keys.values()]


def run(
    sweep: Sweep, folder: Path, *, dtype: str = "auto", device: str = "auto", workers: int = 1, tell: Report
) -> list[Row]:  # fmt: skip
    """Measure every setting that is not in `folder`/results.jsonl → the rows of all settings, in the grid's order."""
    bench = Bench(sweep, dtype, device)
    task = _task(sweep, bench)

    def here(settings: list[Setting], within: Callable[[float, str], None]) -> Iterator[tuple[Setting, Row]]:
        for setting in settings:
            yield setting, measure(bench, sweep, task, setting, report=lambda part, name: within(part, name))

    def spread(settings: list[Setting], within: Callable[[float, str], None]) -> Iterator[tuple[Setting, Row]]:
        yield from over_processes(sweep, settings, workers, dtype, str(bench.base.device))

    common = common_of(bench, sweep, task, workers)
    with Results(folder / RESULTS) as results:
        return complete(results, sweep.settings(), common, here if workers == 1 else spread, tell)


def run_recorded(sweep: Sweep, folder: Path, path: Path, *, dtype: str, device: str, tell: Report) -> list[Row]:
    """As `run`, but each setting that drafts is replayed against the record in `path`, which is first generated with
    the target if it is missing. ValueError, before anything is loaded, for settings that cannot be replayed."""
    settings = [setting for setting in sweep.settings() if setting.drafter != PLAIN]
    for setting in settings:
        if setting.accept != "exact" or setting.temperature:
            raise ValueError(f"{setting}: a record replays greedy text under the exact rule, with drafts")
    bench = Bench(sweep, dtype, device)
    task = _task(sweep, bench)
    prompts, length = prompts_of(bench, sweep, task), sweep.max_new_tokens or task.max_new_tokens
    if not path.exists():
        tell(0.0, "recording the target")
        made = record(bench.base, prompts, length, **NEUTRAL)
        dataclasses.replace(made, base=fingerprint_base(bench.base)).save(path)
    known = load_record(path, bench.base, length)

    def here(settings: list[Setting], within: Callable[[float, str], None]) -> Iterator[tuple[Setting, Row]]:
        for setting in settings:
            yield setting, replay(bench, known, setting, prompts)

    common = common_of(bench, sweep, task) + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    with Results(folder / RESULTS) as results:
        return complete(results, settings, common, here, tell)


def load_record(path: Path, base: PreTrainedModel, length: int | None = None) -> Record:
    """The texts in a record, cut to `length` tokens each (None: uncut). ValueError if it is of another target or its
    texts are shorter; a warning if it does not name its target."""
    known, own = Record.load(path), fingerprint_base(base)
    told = known.base or {}
    if known.base is None:
        logger.warning(
            "%s does not say which target it is of: it must be %s; delete or rename it, and it is recorded anew",
            path, base.name_or_path,
        )  # fmt: skip
    differing = differences(own, told)
    try:
        if differing or known.vocab_size != own["vocab_size"]:
            names = ", ".join(differing or ["vocab_size"])
            raise ValueError(f"it is of another target than {base.name_or_path}, with other {names}")
        return known if length is None else known.cut(length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; delete or rename the file, and it is recorded anew") from error


def over_processes(
    sweep: Sweep, settings: list[Setting], workers: int, dtype: str, device: str
) -> Iterator[tuple[Setting, Row]]:
    """Each setting and its row, as `workers` processes finish them. Each process loads its own models: on CUDA, on the
    next device; on a CPU, with its share of the threads."""
    spawn = multiprocessing.get_context("spawn")  # a forked process can use neither CUDA nor torch's threads
    numbers = spawn.Queue()
    for number in range(workers):
        numbers.put(number)
    pool = ProcessPoolExecutor(workers, spawn, _begin, (sweep, dtype, device, threads_of(workers), numbers))
    try:
        waiting = {pool.submit(_measured, setting): setting for setting in settings}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                setting = waiting.pop(future)
                yield setting, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}


def _begin(sweep: Sweep, dtype: str, device: str, threads: int, numbers: Any) -> None:
    """Load the models of a new process."""
    torch.set_num_threads(threads)
    if device.startswith("cuda"):
        device = f"cuda:{numbers.get() % torch.cuda.device_count()}"
    bench = Bench(sweep, dtype, device)
    _worker.update(bench=bench, sweep=sweep, task=_task(sweep, bench))


def _measured(setting: Setting) -> Row:
    with contextlib.suppress(KeyboardInterrupt):
        return measure(_worker["bench"], _worker["sweep"], _worker["task"], setting)
    raise RuntimeError("stopped")


def _task(sweep: Sweep, bench: Bench) -> Task:
    return load_task(sweep.task, bench.tokenizer, data=sweep.data, count=sweep.num_prompts, run_code=sweep.run_code)
