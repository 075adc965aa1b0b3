"""A peer's process: started once, it answers requests, one JSON object a line on its stdin and stdout.

A request has `op` and its arguments; an answer holds what was asked for, or `error`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specheads.bench.limits import cut, take_row_options
from specheads.bench.runner import Decoder, Output, Stopwatch

Answer = dict[str, Any]


class PeerError(ValueError):
    """A peer refused a request, or its process ended."""


def write_once(path: Path, make: Callable[[Path], Any]) -> None:
    """Have `make` write this file or folder, unless it is there; whole or not at all."""
    if path.exists():
        return
    partial = path.with_name(path.name + "-partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(partial)
    partial.rename(path)


class Peer:
    """One engine, run by the Python of its environment. folder: where it keeps its exports."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self.command, self.folder = name, command, folder
        self._process: subprocess.Popen[str] | None = None
        self.opened: dict[str, Answer] = {}

    def ask(self, op: str, **arguments: Any) -> Answer:
        """The answer to a request. PeerError, with what the peer says, if it cannot be given."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = process.wait()
            self._process = None
            self.opened.clear()
            raise PeerError(f"{self.name}: its process ended with code {code}; its own messages are above")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def open(self, key: str, **arguments: Any) -> None:
        """Have the peer load what later requests call `key`, once."""
        if key not in self.opened:
            self.opened[key] = self.ask("open", key=key, **arguments)

    def decoder(self, key: str, loaded: dict[str, Any], *, max_new_tokens: int, **arguments: Any) -> Decoder:
        """Generates with what `loaded` has the peer load as `key`. The seconds are the peer's own, without the way
        there and back and without loading, which happens again after an error or a crash. All rows of a batch are drawn
        from the seed of its first, in the 31 bits that any engine takes."""

        def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
            inputs, limits, seeds = take_row_options(batch, max_new_tokens)
            ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
            self.open(key, **loaded)
            try:
                seed = seeds[0] % 2**31 if seeds else 0
                asked = {**arguments, "max_new_tokens": max(limits), "seed": seed}
                answer = self.ask("generate", key=key, ids=ids, mask=mask, **asked)
            except PeerError:
                self.opened.pop(key, None)  # an engine may be left in the middle of a text: it is opened anew
                raise
            tokens = cut(answer["tokens"], limits)
            return Output(tokens, answer.get("statistics", {}), seconds=answer["seconds"])

        return run

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            try:
                # In a session of its own, so that Ctrl-C reaches this process alone, which then closes the peer.
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf8",
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"{self.name}: {self.command[0]} does not start: {error.strerror}") from error
        return self._process
