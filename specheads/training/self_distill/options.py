"""The options of `specheads distill`, declared once for Python, the record and the command line.

Nothing here imports torch, so that --help does not wait for it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from specheads.data.config import DataConfig, template_variables
from specheads.options import OptionError, option, refuse_unknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
WINDOWS = 4000  # rows of text, unless num_rows is given
_SAMPLING = ("top_p", "top_k", "min_p")
_SERVER_ONLY = ("model", "extra_body")
# Options that determine the rows of a file, so that a run can resume only with the same values. num_rows may grow.
DECIDING = (
    "base", "source", "split", "chat", "chat_template_kwargs", "prompt_tokens", "max_new_tokens", "max_length",
    "temperature", *_SAMPLING, "dtype", "seed", *_SERVER_ONLY,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Let the base write rows to train on, in its own words.

    A head learns best on the text it will draft.

    Rows with `messages`: the base answers every turn, through the chat template, after its own earlier answers. The
    row's answers are dropped, except tool calls followed by their results, whose turn the base also answers itself.
    `tools` and the calls' reasoning are passed to the template. One line of output per turn.

    Rows with `prompt`: it answers the text as it is or, with --chat, as a user message. Rows with `text` (without
    --source, the standard library): it continues windows of the text from random positions.

    A large base answers on OpenAI-compatible servers (vLLM, SGLang, …) with --server: chats as messages, prompts and
    text as token ids. Servers that honour return_token_ids send exact tokens; the text of others is tokenized here. It
    needs the openai package, and reads the key from OPENAI_API_KEY.

    Each line is {"input_ids": […], "labels": […]}: token ids, so that decoding and encoding cannot change the text. An
    answer is supervised, including its end of text unless it was cut; its prompt is not (-100). Text is supervised from
    the start of its window. Each question is asked once, and sampled again if --num-rows exceeds the number of turns;
    no line is written twice, and OUTPUT.left_out lists what was left out and why. A stopped run resumes if it is
    started again with the same options.

    \b
    Examples:
      specheads distill --base my/model --source chats.jsonl --output own.jsonl
      specheads distill --base my/model --source prompts.jsonl \\
        --output own.jsonl --chat --temperature 0.7
      specheads distill --base my/model --output own.jsonl --num-rows 4000
      specheads distill --base my/70b --source chats.jsonl --output own.jsonl \\
        --server http://gpu1:8000/v1 --server http://gpu2:8000/v1 \\
        --model served-name --concurrency 256 --temperature 0,0.7,1
    """

    base: str = option(help="The base model, a path or hub id; with --server its tokenizer is enough.")
    output: str = option(help="JSONL file to write, or to resume.")
    source: str | None = option(None, "Rows with messages, prompt or text: a file, glob or hub id (default: stdlib).")
    split: str = option("train", "Part of the standard library: train or held_out.")
    num_rows: int | None = option(
        None, f"Lines of the finished file (default: each turn once; {WINDOWS} for text).", min=1
    )
    chat: bool = option(False, "Put each `prompt` into the chat template.")
    chat_template_kwargs: str | None = option(
        None, """Variables of the chat template, as '{"enable_thinking": false}'.""", metavar="JSON"
    )
    prompt_tokens: int = option(64, "Tokens of a window of text.", min=1)
    max_new_tokens: int = option(128, "Most tokens of an answer.", min=1)
    max_length: int = option(DataConfig.max_length, "Most tokens of a line: longer prompts keep their end.")
    temperature: tuple[float, ...] = option(
        (0.0,), "0 is greedy; several, as 0,0.7,1, share the questions equally, and one named twice gets two shares."
    )
    top_p: float | None = option(None, "When sampling (default, here and below: what the base or the server does).")
    top_k: int | None = option(None, "When sampling.", min=1)
    min_p: float | None = option(None, "When sampling.")
    batch_size: int = option(32, "Prompts that the base continues at a time.", min=1)
    dtype: str = option("auto", f"{', '.join(DTYPES)}.")
    seed: int = option(0, "For the order of the prompts and for sampling.")
    server: tuple[str, ...] = option(
        (), "An OpenAI-compatible server that answers instead, as http://host:8000/v1; repeatable: in turn."
    )
    model: str | None = option(None, "Its name on the servers (default: --base).")
    concurrency: int = option(64, "Questions in flight at a time, over all servers.", min=1)
    retries: int = option(6, "Retries of a failed request, after 1, 2, 4, … seconds.")
    timeout: float = option(600.0, "Seconds without data from a server.")
    extra_body: str | None = option(
        None, """Fields of each request, as '{"repetition_penalty": 1.1}'; null removes one.""", metavar="JSON"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", _numbers("temperature", self.temperature))
        object.__setattr__(self, "server", tuple(self.server or ()))
        for name in ("num_rows", "prompt_tokens", "max_new_tokens", "batch_size", "top_k", "concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise OptionError(f"{{{name}}} must be at least 1", **{name: value})
        refuse_unknown([self.split], ("train", "held_out"), "split")
        refuse_unknown([self.dtype], DTYPES, "dtype")
        for temperature in self.temperature:
            if not 0 <= temperature < math.inf:
                raise OptionError("{temperature} must be a finite number of at least 0", temperature=f"{temperature:g}")
        if self.max_length <= self.max_new_tokens:
            raise OptionError(
                "{max_length} must be above {max_new_tokens}",
                max_length=self.max_length, max_new_tokens=self.max_new_tokens,
            )  # fmt: skip
        for name, least in (("top_p", "above 0"), ("min_p", "at least 0")):
            value = getattr(self, name)
            if value is not None and not (0 <= value <= 1 and (value or name == "min_p")):
                raise OptionError(f"{{{name}}} must be {least} and at most 1", **{name: value})
        if self.greedy and (given := self._given(_SAMPLING)):
            raise OptionError(
                f"{{{given[0]}}} changes nothing at {{temperature}}: give one above",
                temperature=0, **{given[0]: getattr(self, given[0])},
            )  # fmt: skip
        if self.retries < 0:
            raise OptionError("{retries} must be at least 0", retries=self.retries)
        if not 0 < self.timeout < math.inf:
            raise OptionError("{timeout} must be a finite number of seconds above 0", timeout=f"{self.timeout:g}")
        if not self.server and (given := self._given(_SERVER_ONLY)):
            name = given[0]
            raise OptionError(
                f"{{{name}}} is for a {{server}}, and none is given", server=..., **{name: getattr(self, name)}
            )
        for url in self.server:
            if not _is_http_address(url):
                raise OptionError("{server}: expected an address such as http://localhost:8000/v1", server=url)
        _ = self.template, self.request  # refuse bad JSON now

    def _given(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    @property
    def deciding(self) -> dict[str, Any]:
        """The options that determine the rows, as JSON has them."""
        return {name: getattr(self, name) for name in DECIDING} | {"temperature": [*self.temperature]}

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


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """Of a text such as 0,0.7,1, as a command line has them, or of a number or several."""
    values = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (value,)
    try:
        return tuple(float(one) for one in values)
    except (TypeError, ValueError):
        raise OptionError(f"{{{name}}}: expected numbers such as 0,0.7,1", **{name: value}) from None


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
        raise OptionError(f"{{{name}}} is not JSON: {error}", **{name: text}) from error
    if not isinstance(value, dict):
        raise OptionError(f"{{{name}}}: expected an object in braces", **{name: text})
    return value
