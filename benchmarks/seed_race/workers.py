"""Sides of benchmarks/seeds.py at work: in this process, or in a Python of their own, asked line by line."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any, Protocol

from seed_race import theirs
from seed_race.theirs import Job, PassCounter, Side

TOLERANCE = 1e-3  # of logits in float32, between two versions of one model's code


class Worker(Protocol):
    """introduced: see `theirs.introduce`. ask(): see `theirs.answer`."""

    introduced: dict[str, Any]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]: ...


class Local:
    def __init__(self, side: Side, counter: PassCounter, introduced: dict[str, Any]) -> None:
        self.side, self.counter, self.introduced = side, counter, introduced

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return theirs.answer(self.side, self.counter, request)


class Remote:
    """theirs.py in another Python. SystemExit with the end of its stderr where it ends early."""

    def __init__(self, python: str, job: Job, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.python, self.log = python, folder / "stderr"
        (folder / "job.json").write_text(json.dumps(job))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, theirs.__file__, str(folder / "job.json")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True,
            )  # fmt: skip
        self.introduced = self._read()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # _read() says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            told = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise SystemExit(f"{self.python} ended with {self.process.wait()}: {' / '.join(told)}")
        found: dict[str, Any] = json.loads(line)
        return found


def refuse_other_model(system: str, theirs: Worker, ours: Worker) -> None:
    """SystemExit where the target gives other logits in their Python: a race would compare two models."""
    pairs = zip(theirs.introduced["logits"], ours.introduced["logits"], strict=True)
    if (apart := max(abs(a - b) for a, b in pairs)) > TOLERANCE:
        version = theirs.introduced["versions"]["transformers"]
        raise SystemExit(
            f"{system}: under transformers {version} the target's logits differ by up to {apart:.3g}, "
            f"expected at most {TOLERANCE:g}: that version reads its config otherwise; give a base that both read"
        )
