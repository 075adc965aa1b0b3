"""The public names that `import specheads` offers, imported at first use of one of them: see specheads/__init__.py.

Importing this imports torch and transformers, whose Auto classes then know the type of our checkpoints.
"""

# ruff: noqa: F401

import specheads.models.named  # loads the checkpoints that draft= names
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
from specheads.decoding.loop import decode
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
from specheads.decoding.results import Step
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
from specheads.models.base.int8 import Int8Config
from specheads.models.config import SpecConfig
from specheads.models.convert import convert, load_head
from specheads.models.files import CheckpointError
from specheads.models.spec_model import SpecModel
