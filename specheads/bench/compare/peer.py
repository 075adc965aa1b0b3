"""A peer's process: started once, it answers requests, one JSON object per line on its stdin and stdout.

A request has `op` and its arguments; an answer has the result, or `error`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specheads.bench.batches import cut, take_row_options
from specheads.bench.runner import Decoder, Output, Stopwatch

Answer = dict[str, Any]


class PeerError(ValueError):
    """A peer refused a request, or its process ended."""


def write_once(path: Path, make: Callable[[Path], Any]) -> None:
    """Have `make` write this file or folder unless it exists. It is written completely or not at all."""
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
    """Another engine, run by the Python of its own environment. folder: for its converted models."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self.command, self.folder = name, command, folder
        self._process: subprocess.Popen[str] | None = None
        self.opened: dict[str, Answer] = {}

    def ask(self, op: str, **arguments: Any) -> Answer:
        """The answer to a request. PeerError, with the peer's message, if it fails."""
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
        """Have the peer load, once, what later requests refer to as `key`."""
        if key not in self.opened:
            self.opened[key] = self.ask("open", key=key, **arguments)

    def decoder(self, key: str, loaded: dict[str, Any], *, max_new_tokens: int, **arguments: Any) -> Decoder:
        """A decoder that generates with `key`, which the peer opens with the arguments `loaded`, again after an error
        or crash. Seconds are measured by the peer, without communication and loading. All rows of a batch are sampled
        with the seed of its first, reduced to the 31 bits that every engine accepts."""

        def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
            inputs, limits, seeds = take_row_options(batch, max_new_tokens)
            ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
            self.open(key, **loaded)
            try:
                seed = seeds[0] % 2**31 if seeds else 0
                asked = {**arguments, "max_new_tokens": max(limits), "seed": seed}
                answer = self.ask("generate", key=key, ids=ids, mask=mask, **asked)
            except PeerError:
                self.opened.pop(key, None)  # the engine may have stopped in mid-text: open it again
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
                # In its own session, so that Ctrl-C reaches only this process, which then closes the peer.
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf8",
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"{self.name}: {self.command[0]} does not start: {error.strerror}") from error
        return self._process
