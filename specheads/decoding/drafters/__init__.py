"""Drafters: objects that propose a tree from a context."""

from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.cascade import Cascade
from specheads.decoding.drafters.lookup import PromptLookup
from specheads.decoding.drafters.maxgram import MaxGram
from specheads.decoding.drafters.model import DraftModel
from specheads.decoding.drafters.named import DRAFTERS
from specheads.decoding.drafters.ngram import NGram, NGramStorage, OneLevelNGramStorage
from specheads.decoding.drafters.path_drafter import PathDrafter

__all__ = [
    "DRAFTERS", "AutoDrafter", "Cascade", "Context", "DraftModel", "Drafter", "MaxGram", "NGram", "NGramStorage",
    "OneLevelNGramStorage", "PathDrafter", "PromptLookup",
]  # fmt: skip
