"""FSD's classes and functions under their own names: models whose generate() drafts as FSD's code does.

It drafts the assistant's five likeliest tokens per step, unless tree= or transformers' own assistant arguments say
otherwise, uses divergences as in `fuzzy_from`, and fills the same lists on the assistant as FSD's code.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from specheads.compat.patch import LENGTHS, DraftingGenerate, replace_generate
from specheads.decoding.acceptance import Acceptance, Fuzzy
from specheads.decoding.generation.generate import generate
from specheads.decoding.planner import chain
from specheads.decoding.results import Step
from specheads.decoding.verify.hf_base import unwrapped

LISTS = (
    "n_matches_list", "candidate_sequences_list", "n_discarded_list", "totals_list", "forced_ml_generations",
    "theoretical_backoffs", "kl_divs",
)  # fmt: skip
NUM_DRAFTED = 5  # whatever the generation config says, as in FSD's code


class FuzzyGenerationMixin(GenerationMixin):
    """A mixin to put before a transformers model class: its generate() then takes `assistant_model=`, FSD's arguments
    and the others that `specheads.patch` adds.

    As an assistant, the model has FSD's lists, with an entry for each step and row that drafted. They only grow
    (clear() them): n_matches_list, the drafts accepted before the first one rejected by its divergence; totals_list,
    these and the token drawn after them; candidate_sequences_list, the tokens drafted; n_discarded_list, those drafted
    but not accepted; theoretical_backoffs, the number of divergences within the threshold, anywhere in the draft; and
    kl_divs, the divergences, one for each draft. They count as in FSD, where a step ends with the token that is drawn.
    Here a step continues if that token equals the draft's, so the text can be longer than totals_list says. Without a
    threshold, n_matches_list counts accepted drafts. forced_ml_generations stays empty, as in FSD.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if issubclass(base, PreTrainedModel) and not issubclass(base, FuzzyGenerationMixin):
                cls.__name__ = base.__name__  # so that a saved config names a class that transformers can load
                break

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_lists(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return FSDGenerate(self, super().generate)(*args, **kwargs)  # type: ignore[misc]


class FSDLlamaForCausalLM(FuzzyGenerationMixin, LlamaForCausalLM):
    """LlamaForCausalLM with FSD's generate()."""


class FSDGemma2ForCausalLM(FuzzyGenerationMixin, Gemma2ForCausalLM):
    """Gemma2ForCausalLM with FSD's generate()."""


class FSDQwen2ForCausalLM(FuzzyGenerationMixin, Qwen2ForCausalLM):
    """Qwen2ForCausalLM with FSD's generate()."""


class FSDAutoModelForCausalLM:
    """transformers' AutoModelForCausalLM, but its models, of any architecture, have FSD's generate()."""

    @classmethod
    def from_pretrained(cls, model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(model_name_or_path, *args, **kwargs)
        patch_generation(model)
        return model


def patch_generation(model: Any) -> AbstractContextManager[Any]:
    """Give a model FSD's generate() and its lists (see `FuzzyGenerationMixin`), until `specheads.unpatch(model)`, or as
    a context manager until the end of the block."""
    undone = replace_generate(model, FSDGenerate)
    add_lists(unwrapped(model))
    return undone


def add_lists(model: Any) -> None:
    for name in LISTS:
        if not hasattr(model, name):
            setattr(model, name, [])


class FSDGenerate(DraftingGenerate):
    """The generate() of a model with FSD's names: it drafts as FSD does, and fills the assistant's lists."""

    def decode(self, call: dict[str, Any]) -> Any:
        small, config = call.get("assistant_model"), call.get("generation_config")
        settings = [call.get("tree"), *(call.get(name, getattr(config, name, None)) for name in LENGTHS)]
        if small is not None and all(setting is None for setting in settings):
            call = {**call, "tree": chain(NUM_DRAFTED)}
        asked = self.arguments(call)
        if small is None or not hasattr(unwrapped(small), "n_matches_list"):
            return generate(self.base, **asked)
        rule = asked.get("accept")
        asked |= {"return_dict_in_generate": True, "output_divergences": isinstance(rule, Fuzzy)}
        if config is not None:  # with one, transformers warns about such an argument
            asked["generation_config"] = copy.deepcopy(config)
            asked["generation_config"].return_dict_in_generate = asked.pop("return_dict_in_generate")
        out: Any = generate(self.base, **asked)
        note_steps(unwrapped(small), out.steps, rule)
        return out if self.returns_dict(call) else out.sequences


def note_steps(small: Any, steps: Sequence[Step], rule: Acceptance | None) -> None:
    """Add the steps of a generation, decoded with this rule, to the lists of the assistant `small`."""
    for step in steps[1:]:
        for row, drafted in enumerate(step.drafted):
            if not drafted:
                continue
            matches, gained = step.accepted[row], len(step.tokens[row])
            if isinstance(rule, Fuzzy):
                apart = step.divergences[row]
                near = rule.near(torch.tensor(apart, dtype=torch.float64)).tolist()
                matches = sum(accumulate((near[node - 1] for node in step.path[row]), min))
                small.kl_divs.extend(apart)
                small.theoretical_backoffs.append(sum(near))
            small.n_matches_list.append(matches)
            small.totals_list.append(min(matches + 1, gained))
            small.candidate_sequences_list.append(drafted)
            small.n_discarded_list.append(drafted - matches)
