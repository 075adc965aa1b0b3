"""specheads: train draft heads for any Hugging Face language model, and get the same text several times faster."""

import importlib
from typing import Any

from specheads.accept import (
    Acceptance,
    Block,
    CSLeniency,
    Ensemble,
    Exact,
    Fuzzy,
    Lenient,
    Margin,
    TopN,
    Traversal,
    Typical,
    Unadjusted,
    fuzzy_from,
)
from specheads.convert import convert, load_head
from specheads.decode import Step, decode
from specheads.drafters import (
    Cascade,
    Context,
    Drafter,
    DraftModel,
    MaxGram,
    NGram,
    NGramStorage,
    OneLevelNGramStorage,
    PromptLookup,
)
from specheads.generation import generate
from specheads.heads import (
    DraftHead,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    HydraConfig,
    MedusaConfig,
    ParallelConfig,
)
from specheads.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.patch import patch, unpatch
from specheads.planner import AdaptiveChain, BestFirstTree, DynamicTree, Plan, SampledTree, StaticTree, chain, comb
from specheads.sampling import Sampler
from specheads.saved_head import CheckpointError
from specheads.spec_model import SpecConfig, SpecModel
from specheads.target import Target, UnsupportedModel
from specheads.tree import DraftTree

__version__ = "0.1.0"

# Training is imported when it is first asked for: decoding needs neither the Trainer nor datasets.
_LAZY = {
    "Collator": "data", "DataConfig": "data", "build_datasets": "data", "token_counts": "data",
    "SpecTrainer": "trainer", "SpecTrainingArguments": "trainer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'specheads' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specheads.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Acceptance", "AdaptiveChain", "BestFirstTree", "Block", "CSLeniency", "Cascade", "CheckpointError", "Collator",
    "Context", "DataConfig", "DraftHead", "DraftModel", "DraftTree", "Drafter", "DynamicTree", "Eagle3Config",
    "EagleConfig", "Ensemble", "Exact", "Fuzzy", "HeadConfig", "HydraConfig", "Lenient", "Margin", "MaxGram",
    "MedusaConfig", "NGram", "NGramStorage", "OneLevelNGramStorage", "ParallelConfig", "Plan", "PromptLookup",
    "SampledTree", "Sampler", "SpecConfig", "SpecGenerateOutput", "SpecModel", "SpecSeq2SeqOutput", "SpecTrainer",
    "SpecTrainingArguments", "StaticTree", "Step", "Target", "TopN", "Traversal", "Typical", "Unadjusted",
    "UnsupportedModel", "build_datasets", "chain", "comb", "convert", "decode", "fuzzy_from", "generate", "load_head",
    "patch", "token_counts", "unpatch",
]  # fmt: skip
