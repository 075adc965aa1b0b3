"""OpenVINO GenAI: a pipeline in this process, and our server of one."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from specheads.audit.clients.client import Answer, until_end
from specheads.audit.clients.http import OpenAIClient, openai_request
from specheads.audit.clients.openvino_server import generation_config
from specheads.audit.settings import Settings
from specheads.decoding.results import AcceptanceCounts


class OpenVinoServer(OpenAIClient):
    """openvino_server.py."""

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        return Answer(until_end(super().read(answer, settings).tokens, settings))

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
            answers.append(Answer(until_end(list(map(int, out.tokens[0])), settings)))
        return answers
