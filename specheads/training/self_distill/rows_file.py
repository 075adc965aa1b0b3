"""The output file: rows in the order of the questions, none twice, and where a stopped run resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from specheads.data.rows import Row
from specheads.files import replacing
from specheads.models.files import refuse_below_file
from specheads.options import OptionError
from specheads.training.self_distill.questions import Ask, Stream

SAME = "the same line is there already"


class RowsFile:
    """Lines of JSON at `path`, one per answer, written a question at a time.

    An answer without a line of its own has a record in `path`.left_out: {"answer": its number among all, from 0,
    "why": …}. Each answer is in one of the two files, so together they count the answers. The record is written first,
    since without it later lines would be taken for other answers. A killed process leaves whole questions and at most
    part of one more. `path`.options holds the options that determine the rows, and the mark of the questions.
    `path`.ahead holds, until the file is full, the answers to questions whose turn has not come: a killed run does not
    ask them again.
    """

    def __init__(self, path: Path, stream: Stream) -> None:
        self.path, self.stream = path, stream
        self.left_out_path = path.with_name(path.name + ".left_out")
        self.options_path = path.with_name(path.name + ".options")
        self.ahead_path = path.with_name(path.name + ".ahead")
        self.lines = self.answers = 0
        self.idle = 0  # questions in a row without a new line
        self.asked_all = False
        self.left_out: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._ahead: dict[int, list[Row | str]] = {}  # by the number of a question's first answer

    @property
    def finished(self) -> bool:
        return self.asked_all or self.lines >= self.stream.wanted or self.idle >= self.stream.cycle

    def has_room(self, asked: Iterable[Ask]) -> bool:
        """Whether lines would be wanting if every answer to these questions gave one."""
        return self.lines + sum(ask.num_turns for ask in asked) < self.stream.wanted

    def require_same(self, options: Mapping[str, Any]) -> None:
        """ValueError if the file holds something else, or rows made with other options or from other questions; else
        save the options next to the rows."""
        if self.path.is_dir():
            raise OptionError("{output} is a folder: give a file", output=str(self.path))
        refuse_below_file(self.path)
        options = {**options, "questions": self.stream.mark}
        if self.path.is_file() and self.path.stat().st_size:
            if not self.options_path.exists():
                raise OptionError(
                    f"{self.path} is there already, and not as rows to continue, which would have "
                    f"{self.options_path} beside them: give another {{output}}", output=...,
                )  # fmt: skip
            before = json.loads(self.options_path.read_bytes())
            differing = [
                f"{name}: {before.get(name)!r}, not {value!r}"
                for name, value in options.items()
                if before.get(name) != value
            ]
            if differing:
                raise OptionError(
                    f"{self.path} was begun with other options ({'; '.join(differing)}): resume it with the same, or "
                    "give another {output}", output=...,
                )  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.options_path) as temporary:
            temporary.write_text(json.dumps(options, indent=2) + "\n", "utf8")

    def resume(self) -> Iterator[Ask]:
        """The questions still to ask. What a question that was cut short has in the file is removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ends, digests = self._read()
        left_out = self._read_left_out()
        asks, wanted = self.stream.asks, self.stream.wanted
        if len(digests) >= wanted:  # a file that is longer than wanted stays as it is
            self.lines, self.left_out = len(digests), Counter(left_out.values())
            os.truncate(self.path, ends[-1])
            return asks
        while not self.finished:
            if (ask := next(asks, None)) is None:
                self.asked_all = True
                break
            end = self.answers + ask.num_turns
            new = sum(number not in left_out for number in range(self.answers, end))
            gained = min(new, wanted - self.lines)
            if self.lines + gained > len(digests):
                asks = chain([ask], asks)
                break
            self.answers, self.lines = end, self.lines + gained
            self.idle = 0 if new else self.idle + 1
        self._resume_ahead()
        kept = {number: why for number, why in left_out.items() if number < self.answers}
        self.left_out = Counter(kept.values())
        self._seen = set(digests[: self.lines])
        if self.path.exists():
            os.truncate(self.path, ends[self.lines])
        records = "".join(_record(number, why) for number, why in sorted(kept.items())).encode()
        if self.left_out_path.exists() and self.left_out_path.read_bytes() != records:
            with replacing(self.left_out_path) as temporary:
                temporary.write_bytes(records)
        return asks

    def add(self, ask: Ask, results: Sequence[Row | str]) -> None:
        """Write the answers to a question: each a row, or the reason why there is none."""
        assert len(results) == ask.num_turns
        lines, records = list[bytes](), list[str]()
        for result in results:
            why = result if isinstance(result, str) else None
            if not isinstance(result, str):
                line = (json.dumps(result) + "\n").encode()
                if (digest := _digest(line)) in self._seen:
                    why = SAME
                elif self.lines + len(lines) < self.stream.wanted:
                    self._seen.add(digest)
                    lines.append(line)
            if why is not None:
                self.left_out[why] += 1
                records.append(_record(self.answers, why))
            self.answers += 1
        self.idle = 0 if lines else self.idle + 1
        if records:
            _append(self.left_out_path, "".join(records).encode())
        _append(self.path, b"".join(lines))
        self.lines += len(lines)

    def keep(self, first: int, results: Sequence[Row | str]) -> None:
        """Save the answers to a question before its turn; first: the number of its first answer among all."""
        _append(self.ahead_path, _ahead_record(first, results))

    def take_kept(self, first: int) -> list[Row | str] | None:
        """The answers that an earlier run kept for this question."""
        return self._ahead.pop(first, None)

    def discard_ahead(self) -> None:
        """Call at the end of a run: nothing is asked any more."""
        self.ahead_path.unlink(missing_ok=True)

    def summary(self) -> str:
        """One line on what became of the answers."""
        text = f"{self.path}: {self.lines} lines"
        if self.lines < self.stream.wanted:
            text += f" of the {self.stream.wanted} asked for: the questions have no further answers"
        if same := self.left_out[SAME]:
            text += f"; left out {same} answers that were the same lines again"
        if refused := self.left_out.total() - same:
            why = next(why for why in self.left_out if why != SAME)
            text += f"; left out {refused} answers ({self.left_out_path} says why), such as: {why}"
        return text

    def _read(self) -> tuple[list[int], list[bytes]]:
        """Byte offsets of the ends of complete lines, preceded by 0, and the digest of each line."""
        ends, digests = [0], []
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        ends.append(ends[-1] + len(line))
                        digests.append(_digest(line))
        return ends, digests

    def _resume_ahead(self) -> None:
        """Read the answers ahead of what is written, and forget the others."""
        if not self.ahead_path.exists():
            return
        lines = [line for line in self.ahead_path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        records = [json.loads(line) for line in lines]
        self._ahead = {record["answer"]: record["results"] for record in records if record["answer"] >= self.answers}
        with replacing(self.ahead_path) as temporary:
            temporary.write_bytes(b"".join(_ahead_record(*answered) for answered in self._ahead.items()))

    def _read_left_out(self) -> dict[int, str]:
        if not self.left_out_path.exists():
            return {}
        lines = self.left_out_path.read_bytes().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return {record["answer"]: record["why"] for record in records}


def _record(number: int, why: str) -> str:
    return json.dumps({"answer": number, "why": why}) + "\n"


def _ahead_record(first: int, results: Sequence[Row | str]) -> bytes:
    return (json.dumps({"answer": first, "results": results}) + "\n").encode()


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _append(path: Path, content: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise OSError(
            f"{path}: {error.strerror}; rows written so far are safe: start again with the same options"
        ) from error
