"""specheads: train draft heads for any Hugging Face language model, and get the same text several times faster."""

# ruff: noqa: F405

import importlib
from typing import TYPE_CHECKING, Any

from specheads.version import __version__ as __version__

if TYPE_CHECKING:
    from specheads.api import *  # noqa: F403
    from specheads.compat.patch import patch, unpatch
    from specheads.data.batches import Collator
    from specheads.data.config import DataConfig
    from specheads.data.datasets import build_datasets, token_counts
    from specheads.training.recipe.arguments import SpecTrainingArguments
    from specheads.training.trainer.trainer import SpecTrainer

__all__ = [
    "Acceptance", "AdaptiveChain", "BestFirstTree", "Block", "CSLeniency", "Cascade", "CheckpointError", "Collator",
    "Context", "Continuation", "DataConfig", "DraftHead", "DraftModel", "DraftTree", "Drafter", "DynamicTree",
    "Eagle3Config", "EagleConfig", "Ensemble", "Exact", "Fuzzy", "HeadConfig", "HydraConfig", "Int8Config",
    "Lenient", "Margin", "MaxGram", "MedusaConfig", "MtpConfig", "NGram", "NGramStorage", "NoResidual",
    "OneLevelNGramStorage", "ParallelConfig", "Plan", "PromptLookup", "SampledTree", "Sampler", "SpecConfig",
    "SpecGenerateOutput", "SpecModel", "SpecSeq2SeqOutput", "SpecTrainer", "SpecTrainingArguments", "StaticTree",
    "Step", "Target", "TopN", "Traversal", "Typical", "UnsupportedModel", "build_datasets", "chain", "comb",
    "convert", "decode", "fuzzy_from", "generate", "generate_many", "load_head", "patch", "token_counts", "unpatch",
]  # fmt: skip

# Decoding needs neither the Trainer nor datasets, nor other toolkits' names: these have modules of their own.
_OTHER_MODULES = {
    "Collator": "data.batches", "DataConfig": "data.config", "build_datasets": "data.datasets",
    "token_counts": "data.datasets",
    "SpecTrainer": "training.trainer.trainer", "SpecTrainingArguments": "training.recipe.arguments",
    "patch": "compat.patch", "unpatch": "compat.patch",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use, so that the command's --help and its Tab do not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'specheads' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specheads.{_OTHER_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
