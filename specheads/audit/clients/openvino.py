"""OpenVINO GenAI: a pipeline in this process, and our server of one."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from specheads.audit.clients.client import Answer, places_of, until_end
from specheads.audit.clients.http import OpenAIClient, openai_request
from specheads.audit.clients.openvino_server import gained_tokens, generation_config
from specheads.audit.settings import Settings
from specheads.decoding.results import AcceptanceCounts


class OpenVinoServer(OpenAIClient):
    """openvino_server.py. depth: drafted tokens a pass."""

    def __init__(self, url: str, model: str, depth: int, **options: Any) -> None:
        super().__init__(url, model, **options)
        self.depth = depth

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        tokens = super().read(answer, settings).tokens
        return _answer(tokens, answer["choices"][0]["gained"], self.depth, settings)

    def counters(self) -> AcceptanceCounts | None:
        with urllib.request.urlopen(f"{self.url}/counters", timeout=self.timeout) as reply:
            counted = json.load(reply)
        return AcceptanceCounts(counted["steps"], counted["tokens"], tuple(counted["by_depth"]))


class OpenVinoGenAI:
    """pipe: an openvino_genai.LLMPipeline; options: of its GenerationConfig, such as num_assistant_tokens=5."""

    def __init__(self, pipe: Any, name: str = "OpenVINO GenAI", **options: Any) -> None:
        self.pipe, self.name, self.options, self.seed = pipe, name, options, 0
        self.genai, self.openvino, self.numpy = map(importlib.import_module, ("openvino_genai", "openvino", "numpy"))

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[Answer]:
        """One request after another: a pipeline takes ids of one length only. Each has a seed of its own."""
        answers = []
        for prompt in prompts:
            self.seed += 1
            ids = self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
            config = generation_config(self.genai, openai_request(prompt, settings), self.seed)
            for name, value in self.options.items():
                setattr(config, name, value)
            out = self.pipe.generate(ids, config)
            depth = getattr(config, "num_assistant_tokens", 0)
            gained = gained_tokens(out) if depth else []
            answers.append(_answer(list(map(int, out.tokens[0])), gained, depth, settings))
        return answers


def _answer(tokens: list[int], gained: list[int], depth: int, settings: Settings) -> Answer:
    """Without places if it does not say which pass gave each token."""
    tokens = until_end(tokens, settings)
    if sum(gained) < len(tokens):
        return Answer(tokens)
    return Answer(tokens, places=places_of(gained, [0] + [depth] * (len(gained) - 1))[: len(tokens)])
