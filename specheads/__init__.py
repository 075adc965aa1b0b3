"""specheads: train draft heads for any Hugging Face language model, and get the same text several times faster."""

from specheads.accept import Acceptance, Exact
from specheads.checkpoint import CheckpointError
from specheads.convert import SpecConfig, SpecModel, convert, load_head
from specheads.decode import Step, decode
from specheads.drafters import Context, Drafter
from specheads.generation import SpecGenerateOutput
from specheads.heads import DraftHead, Eagle3Config, EagleConfig, HeadConfig, MedusaConfig
from specheads.planner import DynamicTree, Plan, SampledTree, StaticTree, chain
from specheads.sampling import Sampler
from specheads.target import Target, UnsupportedModel
from specheads.tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "Acceptance", "CheckpointError", "Context", "DraftHead", "DraftTree", "Drafter", "DynamicTree", "Eagle3Config",
    "EagleConfig", "Exact", "HeadConfig", "MedusaConfig", "Plan", "SampledTree", "Sampler", "SpecConfig",
    "SpecGenerateOutput", "SpecModel", "StaticTree", "Step", "Target", "UnsupportedModel", "chain", "convert", "decode",
    "load_head",
]  # fmt: skip
