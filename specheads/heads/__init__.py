"""Draft heads by name. A new head is one file and one entry here."""

from specheads.heads.base import DraftHead, HeadConfig, TapBatch
from specheads.heads.eagle import EagleConfig, EagleHead
from specheads.heads.eagle3 import Eagle3Config, Eagle3Head
from specheads.heads.hydra import HydraConfig, HydraHead
from specheads.heads.medusa import MedusaConfig, MedusaHead
from specheads.heads.parallel import ParallelHead
from specheads.heads.parallel_config import ParallelConfig
from specheads.heads.vocabulary import DraftVocabulary

HEADS: dict[str, type[DraftHead]] = {
    head.Config.kind: head for head in (MedusaHead, HydraHead, EagleHead, Eagle3Head, ParallelHead)
}

__all__ = [
    "HEADS", "DraftHead", "DraftVocabulary", "Eagle3Config", "Eagle3Head", "EagleConfig", "EagleHead", "HeadConfig",
    "HydraConfig", "HydraHead", "MedusaConfig", "MedusaHead", "ParallelConfig", "ParallelHead", "TapBatch",
]  # fmt: skip
