"""The options of train/self_distill.py."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from specheads.data.chat_template import template_variables
from specheads.data.config import DataConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
WINDOWS = 4000  # rows of text, unless --num_rows is given
_SAMPLING = ("top_p", "top_k", "min_p")
_SERVER_ONLY = ("model", "extra_body")
# Options that determine the rows of a file, so that a run can resume only with the same values. num_rows may grow.
DECIDING = (
    "base", "source", "split", "chat", "chat_template_kwargs", "prompt_tokens", "max_new_tokens", "max_length",
    "temperature", *_SAMPLING, "dtype", "seed", *_SERVER_ONLY,
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    base: str = field(metadata={"help": "the base model, a path or hub id; with --server its tokenizer is enough"})
    output: str = field(metadata={"help": "JSONL file to write, or to resume"})
    source: str | None = field(
        default=None, metadata={"help": "rows with messages, prompt or text: a file, glob or hub id (default: stdlib)"}
    )
    split: str = field(default="train", metadata={"help": "part of the standard library: train or held_out"})
    num_rows: int | None = field(
        default=None, metadata={"help": f"lines of the finished file (default: each turn once; {WINDOWS} for text)"}
    )
    chat: bool = field(default=False, metadata={"help": "put each `prompt` into the chat template"})
    chat_template_kwargs: str | None = field(
        default=None, metadata={"help": """variables of the chat template, as '{"enable_thinking": false}'"""}
    )
    prompt_tokens: int = field(default=64, metadata={"help": "tokens of a window of text"})
    max_new_tokens: int = field(default=128, metadata={"help": "most tokens of an answer"})
    max_length: int = field(
        default=DataConfig.max_length, metadata={"help": "most tokens of a line: longer prompts keep their end"}
    )
    temperature: list[float] = field(
        default_factory=lambda: [0.0],
        metadata={"help": "0 is greedy; several share the questions equally, and one named twice gets two shares"},
    )
    top_p: float | None = field(
        default=None, metadata={"help": "when sampling (default, here and below: what the base or the server does)"}
    )
    top_k: int | None = field(default=None, metadata={"help": "when sampling"})
    min_p: float | None = field(default=None, metadata={"help": "when sampling"})
    batch_size: int = field(default=32, metadata={"help": "prompts that the base continues at a time"})
    dtype: str = field(default="auto", metadata={"help": ", ".join(DTYPES)})
    seed: int = field(default=0, metadata={"help": "for the order of the prompts and for sampling"})
    server: list[str] = field(
        default_factory=list,
        metadata={"help": "OpenAI-compatible servers that answer instead, in turn, as http://host:8000/v1"},
    )
    model: str | None = field(default=None, metadata={"help": "its name on the servers (default: --base)"})
    concurrency: int = field(default=64, metadata={"help": "questions in flight at a time, over all servers"})
    retries: int = field(default=6, metadata={"help": "retries of a failed request, after 1, 2, 4, … seconds"})
    timeout: float = field(default=600.0, metadata={"help": "seconds without data from a server"})
    extra_body: str | None = field(
        default=None,
        metadata={"help": """fields of each request, as '{"repetition_penalty": 1.1}'; null removes one"""},
    )

    def __post_init__(self) -> None:
        for name in ("num_rows", "prompt_tokens", "max_new_tokens", "batch_size", "top_k", "concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if self.split not in ("train", "held_out"):
            raise ValueError(f"--split {self.split} must be train or held_out")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} must be one of {', '.join(DTYPES)}")
        for temperature in self.temperature:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"--temperature {temperature:g} must be a finite number of at least 0")
        if self.max_length <= self.max_new_tokens:
            raise ValueError(f"--max_length {self.max_length} must be above --max_new_tokens {self.max_new_tokens}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p} must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"--min_p {self.min_p} must be between 0 and 1")
        if self.greedy and (given := self._given(_SAMPLING)):
            raise ValueError(
                f"--{given[0]} {getattr(self, given[0])} changes nothing at --temperature 0: give one above"
            )
        if self.retries < 0:
            raise ValueError(f"--retries {self.retries} must be at least 0")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"--timeout {self.timeout:g} must be a finite number of seconds above 0")
        if not self.server and (given := self._given(_SERVER_ONLY)):
            raise ValueError(f"--{given[0]} {getattr(self, given[0])} is for a --server, and none is given")
        for url in self.server:
            if not _is_http_address(url):
                raise ValueError(f"--server {url}: expected an address such as http://localhost:8000/v1")
        _ = self.template, self.request  # refuse bad JSON now

    def _given(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    @property
    def deciding(self) -> dict[str, Any]:
        """The options that determine the rows."""
        return {name: getattr(self, name) for name in DECIDING}

    @property
    def greedy(self) -> bool:
        return not any(self.temperature)

    @cached_property
    def template(self) -> dict[str, Any] | None:
        """Variables of the chat template."""
        return template_variables(_json_object("chat_template_kwargs", self.chat_template_kwargs)) or None

    @cached_property
    def request(self) -> dict[str, Any]:
        """Fields added to each request to a server."""
        return _json_object("extra_body", self.extra_body)

    def sampling(self, temperature: float) -> dict[str, float]:
        """Sampling options as generate() and servers both spell them; none at temperature 0."""
        if not temperature:
            return {}
        return {"temperature": temperature, **{name: getattr(self, name) for name in self._given(_SAMPLING)}}


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed port or brackets
        return False


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name} {text} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name} {text}: expected an object in braces")
    return value
