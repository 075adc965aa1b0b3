"""patch(): lets a Hugging Face model's own generate() take draft arguments, also under transformers' names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationMixin

from specheads.decoding.acceptance import Fuzzy, fuzzy_from
from specheads.decoding.drafters import PromptLookup
from specheads.decoding.drafters.assistant import Assistant, AssistantOptions
from specheads.decoding.drafters.model import writes_alone
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.hf_options import effective_config
from specheads.decoding.kernels.few_rows import few_row_kernels, few_row_layers
from specheads.decoding.verify.hf_base import unwrapped
from specheads.models.spec_model import SpecModel
from specheads.options import shown

_POSITIONAL = [*inspect.signature(GenerationMixin.generate).parameters][1:]
_DRAFTERS = ("assistant_model", "draft", "prompt_lookup_num_tokens")
_FUZZY = ("fsd_div_type", "fsd_div_threshold", "fsd_div_logit_processor")
_OURS = ("tree", "accept", "seed")
_FLAGS = ("output_divergences", "fsd_tracking")  # alone they do not route a call to specheads.generate
_TRANSFORMERS_OWN = ("speculation_type", "use_mtp", "assistant_early_exit", "assistant_ensemble_weight")
LENGTHS = ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule")


def patch(model: Any, *, draft: bool | None = None) -> AbstractContextManager[Any]:
    """Let this model's generate() draft: `model.generate(**inputs, assistant_model=small, fsd_div_threshold=0.4)`.

    A call with one of these arguments goes through `specheads.generate`; any other call is left to the model. So are
    transformers' own drafters: an assistant that is no language model (DFlash, Gemma 4's), speculation_type, use_mtp.
    assistant_model: a smaller model, which drafts as controlled by num_assistant_tokens, assistant_confidence_threshold
    and num_assistant_tokens_schedule, in the call or its own generation config (see AssistantOptions);
    assistant_tokenizer and tokenizer: if its vocabulary differs. prompt_lookup_num_tokens and max_matching_ngram_size:
    copy from the text. fsd_div_threshold, fsd_div_type, fsd_div_logit_processor: FSD's, as in `fuzzy_from`. FSD's
    fsd_tracking means output_divergences, but is ignored if none can be returned. draft, tree, accept, seed,
    output_divergences: as in `specheads.generate`.

    draft=False: calls that are left to the model also get our products of few rows on a CPU, as in
    `specheads.generate(kernels=True)`, for faster plain decoding. ValueError for any other value: what drafts is an
    argument of each call.

    Patching again changes nothing. As a context manager, it is undone at the end of the block. For a peft model, the
    inner model is patched, whose generate() the peft model calls.
    """
    if draft not in (None, False):
        raise ValueError(
            f"patch(draft={shown(draft)}): a patched model's calls say what drafts, model.generate(**inputs, "
            "draft=...); draft=False speeds up those that say nothing"
        )
    return replace_generate(model, DraftingGenerate if draft is None else FasterGenerate)


def replace_generate(model: Any, kind: type[DraftingGenerate]) -> AbstractContextManager[Any]:
    """`patch` with a generate() of this class, which may replace one of another class."""
    base = _base_of(model)
    before = vars(base).get("generate")
    if type(before) is kind:
        return nullcontext(model)
    base.generate = kind(base, before.before if isinstance(before, DraftingGenerate) else before)
    return _Undone(model, before)


def unpatch(model: Any) -> None:
    """Restore the model's own generate(). A model that is not patched stays as it is."""
    base = _base_of(model)
    patched = vars(base).get("generate")
    if isinstance(patched, DraftingGenerate):
        del base.generate
        if patched.before is not None:
            base.generate = patched.before


def _base_of(model: Any) -> Any:
    if isinstance(model, SpecModel):
        raise ValueError("the generate() of a SpecModel drafts already: give it draft=, tree= and accept=")
    return unwrapped(model)


class _Undone(AbstractContextManager[Any]):
    """At the end of a block, restores the generate() that the model had: its own, or an earlier patch."""

    def __init__(self, model: Any, before: Any) -> None:
        self.model, self.before, self.placed = model, before, _base_of(model).generate

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: object) -> None:
        base = _base_of(self.model)
        if vars(base).get("generate") is self.placed:
            del base.generate
            if self.before is not None:
                base.generate = self.before


class DraftingGenerate:
    """The generate() of a patched model; an object, not a closure, so that the model can be copied and pickled.

    before: the instance's own generate(), if it had one instead of its class's.
    """

    def __init__(self, base: Any, before: Any) -> None:
        self.base, self.before = base, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.by_name(args, kwargs)
        config = call.get("generation_config")
        lookup = "prompt_lookup_num_tokens"
        if config is not None and call.get(lookup) is None:
            call[lookup] = getattr(config, lookup, None)
        # A custom_generate decodes in its own way; that of specheads.generate calls this method too.
        ours = call.get("custom_generate") is None
        if not (ours and _given(call, (*_DRAFTERS, *_FUZZY, *_OURS))) or self.is_transformers_own(call):
            for name in (*_FUZZY, *_OURS, *_FLAGS, "draft"):
                kwargs.pop(name, None)
            return self._own(*args, **kwargs)
        return self.decode(call)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of generate(), each by its name."""
        return {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}

    def decode(self, call: dict[str, Any]) -> Any:
        """The result of a call whose arguments ask for drafts."""
        return generate(self.base, **self.arguments(call))

    def is_transformers_own(self, call: dict[str, Any]) -> bool:
        """Does the call ask for drafts that only transformers makes, by an assistant that is no language model or by an
        option of its loop? Not if it also asks for something of ours: `generate` refuses such options by name."""
        if _given(call, (*_FUZZY, *_OURS, "draft")):
            return False
        assistant, config = call.get("assistant_model"), effective_config(self.base, call.get("generation_config"))
        options = any(call.get(name, getattr(config, name, None)) for name in _TRANSFORMERS_OWN)
        return options or (assistant is not None and not writes_alone(assistant))

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """`draft_arguments`, with fsd_tracking as output_divergences if the call can return those."""
        asked = draft_arguments(call)
        if asked.pop("fsd_tracking", False) and isinstance(asked.get("accept"), Fuzzy) and self.returns_dict(call):
            asked["output_divergences"] = True
        return asked

    def returns_dict(self, call: dict[str, Any]) -> bool:
        """Does the call, or its generation config, ask for an output object?"""
        config = effective_config(self.base, call.get("generation_config"))
        asked = call.get("return_dict_in_generate")
        return bool(config.return_dict_in_generate if asked is None else asked)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.base).generate(self.base, *args, **kwargs)


class FasterGenerate(DraftingGenerate):
    """As `DraftingGenerate`; transformers' own loop uses our products of few rows."""

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        modules = [self.base] if kwargs.get("custom_generate") is None else []
        with torch.no_grad(), few_row_kernels(few_row_layers(modules)):
            return super()._own(*args, **kwargs)


def _given(call: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The arguments in `names` that are set: None and FSD's empty list of warpers count as unset."""
    return {
        name: call[name]
        for name in names
        if call.get(name) is not None and not (name == "fsd_div_logit_processor" and call[name] in ([], (), ""))
    }


def draft_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a patched generate() → those of `specheads.generate`. ValueError if they are contradictory."""
    rest = {name: value for name, value in call.items() if name not in (*_DRAFTERS, *_FUZZY, *LENGTHS)}
    own_tokenizer, longest = rest.pop("assistant_tokenizer", None), rest.pop("max_matching_ngram_size", None)
    drafts = _given(call, _DRAFTERS)
    if len(drafts) > 1:
        raise ValueError(f"{' and '.join(f'{name}=' for name in drafts)} each name a drafter; give one of them")
    lengths = _given(call, LENGTHS)
    if lengths and ("assistant_model" not in drafts or call.get("tree") is not None):
        raise ValueError(
            f"{next(iter(lengths))}= is for assistant_model= without tree=; give any other drafter tree=chain(...)"
        )
    fuzzy = _given(call, _FUZZY)
    if fuzzy:
        name = next(iter(fuzzy))
        if not drafts:
            raise ValueError(
                f"{name}= says which drafts to accept, but nothing drafts; give assistant_model= or draft="
            )
        if rest.get("accept") is not None:
            raise ValueError(f"{name}= and accept= both say which drafts to accept; give one of them")
        rest["accept"] = fuzzy_from(**fuzzy)
    config = call.get("generation_config")
    if "assistant_model" in drafts:
        settings = {name: lengths.get(name, getattr(config, name, None)) for name in LENGTHS}
        small, tokenizer = drafts["assistant_model"], rest.get("tokenizer")
        if own_tokenizer is not None and tokenizer is None:
            raise ValueError("assistant_tokenizer= also needs tokenizer=, that of the model itself")
        options = AssistantOptions.of(small, {name: value for name, value in settings.items() if value is not None})
        texts = {"tokenizer": own_tokenizer, "target_tokenizer": tokenizer} if own_tokenizer is not None else {}
        rest["draft"] = Assistant(small, options, **texts)
    elif "prompt_lookup_num_tokens" in drafts:
        longest = longest or getattr(config, "max_matching_ngram_size", None)
        limit = {"max_ngram": longest} if longest else {}
        rest["draft"] = PromptLookup(drafts["prompt_lookup_num_tokens"], **limit)
    else:
        rest |= drafts
    return rest
