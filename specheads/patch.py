"""patch(): a Hugging Face model whose own generate() takes draft arguments, transformers' names for them included."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import GenerationMixin

from specheads import generation
from specheads.accept import fuzzy_from
from specheads.drafters import PromptLookup
from specheads.drafters.assistant import Assistant, AssistantOptions
from specheads.spec_model import SpecModel
from specheads.target import unwrapped

_POSITIONAL = [*inspect.signature(GenerationMixin.generate).parameters][1:]
_DRAFTERS = ("assistant_model", "drafter", "prompt_lookup_num_tokens")
_FUZZY = ("fsd_div_type", "fsd_div_threshold")
_OURS = ("tree", "accept", "seed")
_LENGTHS = ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule")


def patch(model: Any) -> AbstractContextManager[Any]:
    """Let this model's generate() draft: `model.generate(**inputs, assistant_model=small, fsd_div_threshold=0.4)`.

    A call with one of these arguments goes through `specheads.generate`; any other is the model's own, untouched.
    assistant_model: a smaller model, which drafts as the call's num_assistant_tokens, assistant_confidence_threshold
    and num_assistant_tokens_schedule say, or its own generation config (see AssistantOptions); assistant_tokenizer
    and tokenizer where its vocabulary is another. prompt_lookup_num_tokens, and max_matching_ngram_size: copy from the
    text. fsd_div_threshold, fsd_div_type: Fuzzy Speculative Decoding, as in `fuzzy_from`. drafter, tree, accept, seed:
    as in `specheads.generate`.

    Patching again changes nothing. As a context manager, it is undone at the end of the block. A peft model is patched
    at the model within, whose generate() its own calls.
    """
    base = _base_of(model)
    before = vars(base).get("generate")
    if isinstance(before, _Generate):
        return nullcontext(model)
    base.generate = _Generate(base, before)
    return _Undone(model)


def unpatch(model: Any) -> None:
    """Give the model its own generate() back; one that is not patched stays as it is."""
    base = _base_of(model)
    patched = vars(base).get("generate")
    if isinstance(patched, _Generate):
        del base.generate
        if patched.before is not None:
            base.generate = patched.before


def _base_of(model: Any) -> Any:
    if isinstance(model, SpecModel):
        raise ValueError("the generate() of a SpecModel drafts already: give it draft=, tree= and accept=")
    return unwrapped(model)


class _Undone(AbstractContextManager[Any]):
    """Unpatches the model at the end of a block."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: object) -> None:
        unpatch(self.model)


class _Generate:
    """The generate() of a patched model; an object and not a closure, so that the model can be copied and pickled.

    before: a generate() that the model had of its own, in its class's place.
    """

    def __init__(self, base: Any, before: Any) -> None:
        self.base, self.before = base, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        config = call.get("generation_config")
        lookup = "prompt_lookup_num_tokens"
        if config is not None and call.get(lookup) is None:
            call[lookup] = getattr(config, lookup, None)
        # A custom_generate decodes in its own way; that of specheads.generate comes through here too.
        ours = call.get("custom_generate") is None
        if not (ours and any(call.get(name) is not None for name in (*_DRAFTERS, *_FUZZY, *_OURS))):
            for name in (*_FUZZY, *_OURS, "drafter"):
                kwargs.pop(name, None)
            return self._own(*args, **kwargs)
        return generation.generate(self.base, **draft_arguments(call))

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.base).generate(self.base, *args, **kwargs)


def draft_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a patched generate() → those of `specheads.generate`. ValueError for what contradicts itself."""
    rest = {name: value for name, value in call.items() if name not in (*_DRAFTERS, *_FUZZY, *_LENGTHS)}
    own_tokenizer, longest = rest.pop("assistant_tokenizer", None), rest.pop("max_matching_ngram_size", None)
    drafts = {name: call[name] for name in _DRAFTERS if call.get(name) is not None}
    if len(drafts) > 1:
        raise ValueError(f"{' and '.join(f'{name}=' for name in drafts)} each say what drafts; give one of them")
    lengths = {name: call[name] for name in _LENGTHS if call.get(name) is not None}
    if lengths and ("assistant_model" not in drafts or call.get("tree") is not None):
        raise ValueError(
            f"{next(iter(lengths))}= is for assistant_model= without tree=; give any other drafter tree=chain(...)"
        )
    fuzzy = {name: call[name] for name in _FUZZY if call.get(name) is not None}
    if fuzzy:
        name = next(iter(fuzzy))
        if not drafts:
            raise ValueError(f"{name}= says which drafts stand, but nothing drafts; give assistant_model= or drafter=")
        if rest.get("accept") is not None:
            raise ValueError(f"{name}= and accept= both say which drafts stand; give one of them")
        rest["accept"] = fuzzy_from(**fuzzy)
    config = call.get("generation_config")
    if "assistant_model" in drafts:
        given = {name: lengths.get(name, getattr(config, name, None)) for name in _LENGTHS}
        small, tokenizer = drafts["assistant_model"], rest.get("tokenizer")
        if own_tokenizer is not None and tokenizer is None:
            raise ValueError("assistant_tokenizer= also takes tokenizer=, that of the model itself")
        options = AssistantOptions.of(small, {name: value for name, value in given.items() if value is not None})
        texts = {"tokenizer": own_tokenizer, "target_tokenizer": tokenizer} if own_tokenizer is not None else {}
        rest["drafter"] = Assistant(small, options, **texts)
    elif "prompt_lookup_num_tokens" in drafts:
        longest = longest or getattr(config, "max_matching_ngram_size", None)
        found = {"max_ngram": longest} if longest else {}
        rest["drafter"] = PromptLookup(drafts["prompt_lookup_num_tokens"], **found)
    else:
        rest["drafter"] = drafts.get("drafter")
    return rest
