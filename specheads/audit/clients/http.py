"""Servers by HTTP that say which tokens they wrote: vLLM at /v1/completions, SGLang at /generate, llama.cpp at
/completion."""

from __future__ import annotations

import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from specheads.audit.clients.client import Answer
from specheads.audit.settings import Settings
from specheads.decoding.results import AcceptanceCounts

KEY = "OPENAI_API_KEY"
COUNTERS = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)(?:_total)?\{(.*)\} (\S+)$", re.M
)
POSITION = re.compile(r'position="(\d+)"')
BUSY = {425, 429, 503}  # asked again until the time is over
RETRIED = {*BUSY, 408, 500, 502, 504}
LONGEST_DELAY = 30.0  # seconds between two tries


class ServerError(OSError):
    """No answer, or one that an audit cannot use."""


class HttpClient(ABC):
    """Asks for all prompts of a call at once, one request each, so that the server batches them.

    url: with or without /v1. key: sent as a bearer token (default: the environment's OPENAI_API_KEY). retries: of a
    request that failed; one that a busy server refuses is sent until its time is over. An answer may take `timeout`
    seconds, and `patience` seconds for each token of all requests of the call, since a slow server may answer them one
    after another. One that takes longer is not asked for again, which would make the server slower yet.
    """

    route = ""

    def __init__(
        self, url: str, *, key: str | None = None, retries: int = 3, timeout: float = 600.0, patience: float = 10.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r}: expected an address such as http://localhost:8000")
        self.name, self.key = self.url, os.environ.get(KEY) if key is None else key
        self.retries, self.timeout, self.patience, self.delay = retries, timeout, patience, 1.0

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[Answer]:
        seconds = self.timeout + self.patience * len(prompts) * settings.max_tokens

        def ask_one(prompt: list[int]) -> Answer:
            return self.read(self.post(self.body(prompt, settings), seconds), settings)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask_one, prompts))

    def counters(self) -> AcceptanceCounts | None:
        """None where the answers say it, or nobody does."""
        return None

    @abstractmethod
    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        """The request, with every sampler set, neutral ones too."""

    @abstractmethod
    def read(self, answer: dict[str, Any], settings: Settings) -> Answer: ...

    def post(self, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to the request within so many seconds; ServerError after the last retry, or at once if a retry
        would not help."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(self.url + self.route, json.dumps(body).encode(), headers)
        limit, failed = time.monotonic() + seconds, 0
        for attempt in count():
            try:
                with urllib.request.urlopen(request, timeout=seconds) as reply:
                    answer = json.load(reply)
                if isinstance(answer, dict):
                    return answer
                problem = f"its answer is no JSON object but {str(answer)[:60]}"
                break
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code not in RETRIED:
                    break
                failed += error.code not in BUSY
            except (OSError, ValueError) as error:
                problem, failed = str(error) or type(error).__name__, failed + 1
                if "timed out" in problem:  # in a URLError, or bare
                    problem = f"no answer within {seconds:.0f} s; see its log, or ask for fewer tokens with max_tokens"
                    break
            delay = min(self.delay * 2**attempt, LONGEST_DELAY)
            if failed > self.retries or time.monotonic() + delay > limit:
                break
            time.sleep(delay)
        raise ServerError(f"{request.full_url}: {problem}")


def openai_request(prompt: list[int], settings: Settings) -> dict[str, Any]:
    """A request of /v1/completions with vLLM's names for what OpenAI does not have."""
    body = {
        "prompt": prompt, "max_tokens": settings.max_tokens, "n": 1, "temperature": settings.temperature,
        "top_p": settings.top_p, "top_k": settings.top_k, "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty, "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty, "return_token_ids": True,
    }  # fmt: skip
    ends: dict[str, Any] = {"stop_token_ids": sorted(settings.eos)} if settings.eos else {"ignore_eos": True}
    more = {"stop": list(settings.stop)} if settings.stop else {}
    return {**body, **ends, **more, **({"logprobs": 1} if settings.logprobs else {})}


class OpenAIClient(HttpClient):
    """vLLM and others that know `return_token_ids`. model: its name there."""

    route = "/v1/completions"

    def __init__(self, url: str, model: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.model = model

    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        return {"model": self.model, **openai_request(prompt, settings)}

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        choice = (answer.get("choices") or [{}])[0]
        if not isinstance(choice.get("token_ids"), list):
            raise ServerError(f"{self.url} sent no token_ids: it does not know return_token_ids, which an audit needs")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        return Answer([int(token) for token in choice["token_ids"]], choice.get("text"), _floats(logprobs))

    def counters(self) -> AcceptanceCounts | None:
        """Of vLLM's /metrics, summed over engines. Drafts past the end of a text count there."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=self.timeout) as reply:
                page = reply.read().decode(errors="replace")
        except OSError:
            return None
        sums: Counter[tuple[str, int]] = Counter()
        for name, labels, value in COUNTERS.findall(page):
            position = POSITION.search(labels)
            sums[name, int(position[1]) if position else -1] += int(float(value))
        by_depth = [sums["accepted_tokens_per_pos", d] for d in range(1 + max((d for _, d in sums), default=-1))]
        steps = sums["drafts", -1]
        return AcceptanceCounts(steps, steps + sums["accepted_tokens", -1], tuple(by_depth)) if sums else None


class SGLangClient(HttpClient):
    """SGLang's own route, which says how often a text was verified, and how many passes accepted 0, 1, … drafts. Newer
    versions have other names for both. top_k -1 keeps all tokens there."""

    route = "/generate"

    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": settings.max_tokens, "temperature": settings.temperature, "top_p": settings.top_p,
            "top_k": settings.top_k or -1, "min_p": settings.min_p, "repetition_penalty": settings.repetition_penalty,
            "presence_penalty": settings.presence_penalty, "frequency_penalty": settings.frequency_penalty, "n": 1,
            "stop": list(settings.stop) or None,
            "stop_token_ids": sorted(settings.eos) or None, "ignore_eos": not settings.eos,
        }  # fmt: skip
        return {
            "input_ids": prompt, "sampling_params": sampling, "stream": False, "return_logprob": settings.logprobs,
        }  # fmt: skip

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        if not isinstance(answer.get("output_ids"), list):
            raise ServerError(f"{self.url} sent no output_ids, which an audit needs")
        tokens, meta = [int(token) for token in answer["output_ids"]], answer.get("meta_info") or {}
        drafted, steps = (
            meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num")),
            meta.get("spec_verify_ct"),
        )
        passes = meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram")) or ()
        by_depth = tuple(sum(passes[depth:]) for depth in range(1, len(passes)))
        accepted = len(tokens) - 1 - steps if steps else None
        logprobs = _floats(one[0] for one in meta.get("output_token_logprobs") or ())
        return Answer(tokens, answer.get("text"), logprobs, drafted, accepted, by_depth)


class LlamaCppClient(HttpClient):
    """llama.cpp's own route, whose tokens lack the EOS. Its samplers cut before they apply the temperature unless told
    otherwise, and are put in transformers' order here."""

    route = "/completion"

    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        if len(settings.eos) > 1:
            raise ValueError(f"llama.cpp does not say which of {len(settings.eos)} end tokens ended a text")
        if (settings.presence_penalty or settings.frequency_penalty) and not settings.count_prompt:
            raise ValueError("llama.cpp's presence and frequency penalties count the prompt: set count_prompt")
        return {
            "prompt": prompt, "n_predict": settings.max_tokens, "temperature": settings.temperature,
            "top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p,
            "repeat_penalty": settings.repetition_penalty, "repeat_last_n": len(prompt) + settings.max_tokens,
            "presence_penalty": settings.presence_penalty, "frequency_penalty": settings.frequency_penalty,
            "typical_p": 1.0, "dry_multiplier": 0.0,
            "xtc_probability": 0.0, "mirostat": 0,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"], "stop": list(settings.stop),
            "ignore_eos": not settings.eos, "n_probs": int(settings.logprobs), "return_tokens": True,
            "cache_prompt": False, "stream": False,
        }  # fmt: skip

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        if not isinstance(answer.get("tokens"), list):
            raise ServerError(f"{self.url} sent no tokens: it does not know return_tokens, which an audit needs")
        tokens = [int(token) for token in answer["tokens"]]
        if answer.get("stop_type") == "eos" and not (tokens and tokens[-1] in settings.eos):
            if not settings.eos:
                raise ServerError(f"{self.url} ended a text by itself, though no end token was asked for")
            tokens.append(*settings.eos)
        times = answer.get("timings") or {}
        logprobs = _floats(one.get("logprob") for one in answer.get("completion_probabilities") or ())
        return Answer(tokens, answer.get("content"), logprobs, times.get("draft_n"), times.get("draft_n_accepted"))


def _floats(values: Iterable[Any] | None) -> tuple[float, ...] | None:
    """What is no number becomes NaN, which fits no token."""
    return tuple(float(v) if isinstance(v, int | float) else math.nan for v in values or ()) or None
