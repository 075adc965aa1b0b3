"""OpenVINO GenAI in this process."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from specheads.audit.clients.client import Answer, until_end
from specheads.audit.settings import Settings


class OpenVinoGenAI:
    """pipe: an openvino_genai.LLMPipeline; options: of its GenerationConfig, such as num_assistant_tokens=5.

    Its samplers cut by top-k before top-p, as transformers does; it has no min-p, which is refused.
    """

    def __init__(self, pipe: Any, name: str = "OpenVINO GenAI", **options: Any) -> None:
        self.pipe, self.name, self.options, self.seed = pipe, name, options, 0
        self.genai, self.openvino, self.numpy = map(importlib.import_module, ("openvino_genai", "openvino", "numpy"))

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[Answer]:
        """One request after another: a pipeline takes ids of one length only. Each has a seed of its own."""
        if settings.min_p:
            raise ValueError(f"OpenVINO GenAI has no min-p, and {settings.min_p:g} was asked for")
        if len(settings.eos) > 1:
            raise ValueError(f"expected at most one end token, got {len(settings.eos)}")
        answers = []
        for prompt in prompts:
            self.seed += 1
            ids = self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
            out = self.pipe.generate(ids, self.config(settings))
            answers.append(Answer(until_end(list(map(int, out.tokens[0])), settings)))
        return answers

    def config(self, settings: Settings) -> Any:
        """With every sampler set, neutral ones too."""
        config = self.genai.GenerationConfig()
        config.do_sample, config.rng_seed, config.apply_chat_template = not settings.greedy, self.seed, False
        config.max_new_tokens, config.repetition_penalty = settings.max_tokens, settings.repetition_penalty
        config.ignore_eos, config.include_stop_str_in_output = not settings.eos, True
        if settings.eos:
            config.eos_token_id = next(iter(settings.eos))
            config.stop_token_ids = set(settings.eos)
        if settings.stop:
            config.stop_strings = set(settings.stop)
        if not settings.greedy:
            config.temperature, config.top_p = settings.temperature, settings.top_p
            config.top_k = settings.top_k or 2**63 - 1
        for name, value in self.options.items():
            setattr(config, name, value)
        return config
