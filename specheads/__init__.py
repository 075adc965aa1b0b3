"""specheads: train draft heads for any Hugging Face language model, and get the same text several times faster."""

import importlib
import sys
from typing import Any

if sys.argv[:1] == ["-m"] and "specheads" in sys.orig_argv:  # `python -m specheads` imports this before its __main__
    from specheads_cli.interrupt import listen

    listen("specheads")

from specheads.decoding.acceptance import (
    Acceptance,
    Block,
    CSLeniency,
    Ensemble,
    Exact,
    Fuzzy,
    Lenient,
    Margin,
    NoResidual,
    TopN,
    Traversal,
    Typical,
    fuzzy_from,
)
from specheads.decoding.drafters import (
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
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.many import Continuation, generate_many
from specheads.decoding.generation.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.decoding.loop import Step, decode
from specheads.decoding.planner import (
    AdaptiveChain,
    BestFirstTree,
    DynamicTree,
    Plan,
    SampledTree,
    StaticTree,
    chain,
    comb,
)
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import UnsupportedModel
from specheads.heads import (
    DraftHead,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    HydraConfig,
    MedusaConfig,
    MtpConfig,
    ParallelConfig,
)
from specheads.models.config import SpecConfig
from specheads.models.convert import convert, load_head
from specheads.models.files import CheckpointError
from specheads.models.spec_model import SpecModel
from specheads.version import __version__ as __version__

# Imported on first use: decoding needs neither the Trainer nor datasets, nor other toolkits' names.
_LAZY = {
    "Collator": "data.batches", "DataConfig": "data.config", "build_datasets": "data.datasets",
    "token_counts": "data.datasets",
    "SpecTrainer": "training.trainer.trainer", "SpecTrainingArguments": "training.recipe.arguments",
    "patch": "compat.patch", "unpatch": "compat.patch",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'specheads' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specheads.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Acceptance", "AdaptiveChain", "BestFirstTree", "Block", "CSLeniency", "Cascade", "CheckpointError", "Collator",
    "Context", "Continuation", "DataConfig", "DraftHead", "DraftModel", "DraftTree", "Drafter", "DynamicTree",
    "Eagle3Config", "EagleConfig", "Ensemble", "Exact", "Fuzzy", "HeadConfig", "HydraConfig", "Lenient", "Margin",
    "MaxGram", "MedusaConfig", "MtpConfig", "NGram", "NGramStorage", "NoResidual", "OneLevelNGramStorage",
    "ParallelConfig", "Plan", "PromptLookup", "SampledTree", "Sampler", "SpecConfig", "SpecGenerateOutput", "SpecModel",
    "SpecSeq2SeqOutput",
    "SpecTrainer", "SpecTrainingArguments", "StaticTree", "Step", "Target", "TopN", "Traversal", "Typical",
    "UnsupportedModel", "build_datasets", "chain", "comb", "convert", "decode", "fuzzy_from", "generate",
    "generate_many", "load_head", "patch", "token_counts", "unpatch",
]  # fmt: skip
