"""Other repositories' functions, with their names and arguments, on top of `specheads.generate`: change the import.

Here: romsto's Speculative-Decoding, CS Drafting and the top-k notebook. ModelOpt's are in `specheads.compat.modelopt`,
and FSD's, with its model classes, in `specheads.compat.fsd`.
"""

import importlib
from typing import Any

_NAMES = {
    "beams": ("beam_search_generate",),
    "cs_drafting": (
        "TIME_COST", "CSDraftingDecoderModel", "CSDraftingDecoderModelKVCache", "CSDraftingEncoderDecoderModel",
        "CSDraftingMaGModel", "CSDraftingModel", "CountedCSDraftingCachedDecoderModel",
        "CountedCSDraftingCachedEncoderDecoderModel", "CountedCSDraftingDecoderModel",
        "CountedCSDraftingDecoderModelKVCache", "CountedCSDraftingEncoderDecoderModel", "DummyModel", "csd",
        "format_initial_input", "get_mag_model", "get_test_set",
    ),
    "fsd": ("FSDAutoModelForCausalLM", "FuzzyGenerationMixin", "patch_generation"),
    "notebook": ("generate_draft", "get_topk_probas", "set_models", "speculative_decode"),
    "processors": (
        "GreedyProcessor", "LogitsProcessor", "MultinomialProcessor", "NucleusProcessor", "TopKNucleusProcessor",
        "TopKProcessor",
    ),
    "romsto": (
        "NGramStorage", "OneLevelNGramStorage", "autoregressive_generate", "autoregressive_generate_encoder_decoder",
        "ngram_assisted_speculative_generate", "speculative_generate", "speculative_generate_encoder_decoder",
    ),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
