"""Other repositories' functions, with their names and arguments, on top of `specheads.generate`: change the import.

Here: romsto's Speculative-Decoding, CS Drafting and the top-k notebook. ModelOpt's are in `specheads.compat.modelopt`,
and FSD's, with its model classes, in `specheads.compat.fsd`.
"""

from specheads.compat.beams import beam_search_generate
from specheads.compat.cs_drafting import csd, format_initial_input, get_test_set
from specheads.compat.cs_models import (
    TIME_COST,
    CountedCSDraftingCachedDecoderModel,
    CountedCSDraftingCachedEncoderDecoderModel,
    CountedCSDraftingDecoderModel,
    CountedCSDraftingDecoderModelKVCache,
    CountedCSDraftingEncoderDecoderModel,
    CSDraftingDecoderModel,
    CSDraftingDecoderModelKVCache,
    CSDraftingEncoderDecoderModel,
    CSDraftingMaGModel,
    CSDraftingModel,
    DummyModel,
    get_mag_model,
)
from specheads.compat.fsd import FSDAutoModelForCausalLM, FuzzyGenerationMixin, patch_generation
from specheads.compat.notebook import generate_draft, get_topk_probas, set_models, speculative_decode
from specheads.compat.processors import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from specheads.compat.romsto import (
    autoregressive_generate,
    autoregressive_generate_encoder_decoder,
    ngram_assisted_speculative_generate,
    speculative_generate,
    speculative_generate_encoder_decoder,
)
from specheads.compat.storages import NGramStorage, OneLevelNGramStorage

__all__ = [
    "TIME_COST",
    "CSDraftingDecoderModel",
    "CSDraftingDecoderModelKVCache",
    "CSDraftingEncoderDecoderModel",
    "CSDraftingMaGModel",
    "CSDraftingModel",
    "CountedCSDraftingCachedDecoderModel",
    "CountedCSDraftingCachedEncoderDecoderModel",
    "CountedCSDraftingDecoderModel",
    "CountedCSDraftingDecoderModelKVCache",
    "CountedCSDraftingEncoderDecoderModel",
    "DummyModel",
    "FSDAutoModelForCausalLM",
    "FuzzyGenerationMixin",
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NGramStorage",
    "NucleusProcessor",
    "OneLevelNGramStorage",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "beam_search_generate",
    "csd",
    "format_initial_input",
    "generate_draft",
    "get_mag_model",
    "get_test_set",
    "get_topk_probas",
    "ngram_assisted_speculative_generate",
    "patch_generation",
    "set_models",
    "speculative_decode",
    "speculative_generate",
    "speculative_generate_encoder_decoder",
]  # fmt: skip
