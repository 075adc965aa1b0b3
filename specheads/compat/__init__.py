"""Functions of other repositories under their own names and arguments, over `specheads.generate`: change the import.

romsto's Speculative-Decoding, CS Drafting and the top-k notebook; ModelOpt's in `specheads.compat.modelopt`. Users of
FSD call generate(): `specheads.patch(model)`.
"""

from specheads.compat.beams import beam_search_generate
from specheads.compat.cs_drafting import (
    CSDraftingDecoderModel,
    CSDraftingEncoderDecoderModel,
    CSDraftingMaGModel,
    csd,
    get_mag_model,
)
from specheads.compat.notebook import generate_draft, get_topk_probas, speculative_decode
from specheads.compat.processors import (
    GreedyProcessor,
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
from specheads.drafters import NGramStorage, OneLevelNGramStorage

__all__ = [
    "CSDraftingDecoderModel", "CSDraftingEncoderDecoderModel", "CSDraftingMaGModel", "GreedyProcessor",
    "MultinomialProcessor", "NGramStorage", "NucleusProcessor", "OneLevelNGramStorage", "TopKNucleusProcessor",
    "TopKProcessor", "autoregressive_generate", "autoregressive_generate_encoder_decoder", "beam_search_generate",
    "csd", "generate_draft", "get_mag_model", "get_topk_probas", "ngram_assisted_speculative_generate",
    "speculative_decode", "speculative_generate", "speculative_generate_encoder_decoder",
]  # fmt: skip
