"""ModelOpt's acceptance rate: tokens an iteration, where the first iteration gives one token and drafts nothing.

Ours (accepted_length) leaves that iteration out. Shapes: T prompt tokens, S drafted tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specheads.compat.plain import generate_plainly

# What chat templates use to drop a reasoning text, which is part of the text to be predicted.
_DROP_REASONING = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"


class AcceptanceRateValidation:
    """model: what convert() gave, or AutoModelForCausalLM.from_pretrained after enable_huggingface_checkpointing().
    One prompt at a time; TypeError for another model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "pseudo_speculative_generate"):
            raise TypeError(
                f"a {type(model).__name__} is not validated here: give what convert() gave, or a head's folder loaded "
                "by AutoModelForCausalLM.from_pretrained after enable_huggingface_checkpointing()"
            )
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = tokenizer.chat_template.replace(_DROP_REASONING, "")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.end_token = tokenizer.eos_token_id

    def tokenize(self, prompt: list[dict[str, str]]) -> Tensor:
        """The ids (1, T) of a conversation that the assistant is to answer."""
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        made = self.tokenizer(text, return_tensors="pt", add_special_tokens=False, truncation=True)
        return made.input_ids.to(self.model.device)

    def get_ground_truth(self, input_ids: Tensor, osl: int) -> Tensor:
        """The prompt (1, T) and the base's own greedy text after it, at most `osl` tokens, its end token included."""
        end = self.end_token
        return generate_plainly(self.model.base, input_ids, osl, eos_token_id=end, pad_token_id=end).sequences

    def validate(
        self,
        osl: int,
        prompt: list[dict[str, str]] | None = None,
        input_ids: Tensor | None = None,
        ground_truth: Tensor | None = None,
        steps: int = 1,
        tree_paths: list[list[int]] | None = None,
    ) -> tuple[Tensor, float]:
        """A fixed text (1, T') that begins with the prompt, the base's own unless given, and its tokens an iteration.

        steps: tokens drafted an iteration. A draft is accepted as far as it is that text. Then comes the base's own
        token, as there, whatever the text has in its place: after a token that differs, the base and its drafts follow
        a mixture of both, and are still compared with the text, index by index. So the rate of a text that is not the
        base's own (another model's, or sampled) is not that of decoding it, and no rate of the text alone.
        """
        if tree_paths is not None:
            raise ValueError("tree_paths: chains alone are counted, as for Hugging Face models there; give steps")
        ids = self._prompt(prompt, input_ids)
        text = self.get_ground_truth(ids, osl) if ground_truth is None else ground_truth.to(ids.device)
        begin, end, iterations = ids.shape[1], text.shape[1], 0
        if end <= begin:
            raise ValueError(f"the ground truth of {end} tokens has none after the prompt of {begin}")
        draft: Tensor | None = None
        while ids.shape[1] < end:
            iterations += 1
            if draft is not None:
                rest = text[:, ids.shape[1] :]
                drafted = draft[:, : rest.shape[1]]
                ids = torch.cat([ids, drafted[:, : _agreeing(drafted, rest)]], 1)
            if ids.shape[1] < end:
                token, draft = self.model.pseudo_speculative_generate(ids, steps=steps)
                ids = torch.cat([ids, token], 1)
        return text, (end - begin) / iterations

    def validate_online(
        self, osl: int, prompt: list[dict[str, str]] | None = None, input_ids: Tensor | None = None, steps: int = 1
    ) -> tuple[Tensor, float]:
        """The text (1, T') that drafts, and the base after them, write; and its tokens an iteration.

        The base's token in place of a rejected one is appended and not counted, as there.
        """
        ids = self._prompt(prompt, input_ids)
        end, counted, iterations = ids.shape[1] + osl, 0, 0
        while ids.shape[1] < end:
            iterations += 1
            counted += 1
            token, draft = self.model.pseudo_speculative_generate(ids, steps=steps)
            ids = torch.cat([ids, token], 1)
            if draft is None or ids.shape[1] >= end:
                continue
            own = self._greedy_after(ids, draft)
            accepted = min(_agreeing(draft, own), end - ids.shape[1])
            counted += accepted
            ids = torch.cat([ids, draft[:, :accepted]], 1)
            if accepted < draft.shape[1] and ids.shape[1] < end:
                ids = torch.cat([ids, own[:, accepted : accepted + 1]], 1)
        return ids, counted / iterations if iterations else 0.0

    def _prompt(self, prompt: list[dict[str, str]] | None, input_ids: Tensor | None) -> Tensor:
        if input_ids is None and prompt is None:
            raise ValueError("give a prompt (a conversation) or its input_ids")
        ids = self.tokenize(prompt) if input_ids is None else input_ids  # type: ignore[arg-type]
        if ids.shape[0] != 1:
            raise ValueError(f"a batch of {ids.shape[0]} prompts; give one at a time")
        return ids.to(self.model.device)

    @torch.no_grad()
    def _greedy_after(self, ids: Tensor, draft: Tensor) -> Tensor:
        """(1, S): what the base says in place of each drafted token, given those before it."""
        logits = self.model(input_ids=torch.cat([ids, draft], 1), use_cache=False).logits
        return logits[:, ids.shape[1] - 1 : -1].argmax(-1)


class HFARValidation(AcceptanceRateValidation):
    """The name it has there for Hugging Face models."""


def _agreeing(drafted: Tensor, text: Tensor) -> int:
    """How many of the first tokens of drafted (1, S) are those of text (1, at least S)."""
    same = drafted == text[:, : drafted.shape[1]]
    return int(same.long().cumprod(1).sum())
