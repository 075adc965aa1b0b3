"""Drafters: whatever proposes a tree from a context."""

from specheads.drafters.base import Context, Drafter
from specheads.drafters.cascade import Cascade
from specheads.drafters.lookup import PromptLookup
from specheads.drafters.maxgram import MaxGram
from specheads.drafters.model import DraftModel
from specheads.drafters.ngram import NGram, NGramStorage, OneLevelNGramStorage

__all__ = [
    "Cascade", "Context", "DraftModel", "Drafter", "MaxGram", "NGram", "NGramStorage", "OneLevelNGramStorage",
    "PromptLookup",
]  # fmt: skip
