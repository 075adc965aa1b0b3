"""Draft heads by kind. A new head is one file and one entry here."""

from typing import Any

from specheads.heads.base import DraftHead, TapBatch
from specheads.heads.config import HeadConfig
from specheads.heads.eagle import EagleConfig, EagleHead
from specheads.heads.eagle3 import Eagle3Config, Eagle3Head
from specheads.heads.hydra import HydraConfig, HydraHead
from specheads.heads.medusa import MedusaConfig, MedusaHead
from specheads.heads.mtp.config import MtpConfig
from specheads.heads.mtp.head import MtpHead
from specheads.heads.parallel import ParallelConfig, ParallelHead
from specheads.heads.vocabulary import DraftVocabulary
from specheads.options import refuse_unknown, shown

HEADS: dict[str, type[DraftHead]] = {
    head.Config.kind: head for head in (MedusaHead, HydraHead, EagleHead, Eagle3Head, MtpHead, ParallelHead)
}


def head_kind(name: object) -> str:
    """`name`, if it is a kind of head. ValueError otherwise."""
    if isinstance(name, type) and issubclass(name, HeadConfig):
        raise ValueError(f"{name.__name__} is the class of a head's config; give one of its objects: {name.__name__}()")
    if not isinstance(name, str):
        raise ValueError(f"unknown head {shown(name)}; known: {', '.join(HEADS)}")
    refuse_unknown([name], HEADS, "head")
    return name


def head_config(head: str | HeadConfig | list[Any], options: dict[str, Any]) -> HeadConfig:
    """The config of a head, given in any form that convert(), recipes and checkpoints allow."""
    if isinstance(head, list):
        if len(head) != 1 or not isinstance(head[0], tuple | list) or len(head[0]) != 2:
            raise ValueError(
                f"a head list is [(name, options)] with one entry, not {head!r}; convert again for a second head"
            )
        name, listed = head[0]
        head, options = name, {**listed, **options}
    if isinstance(head, HeadConfig):
        if options:
            raise ValueError(f"options {sorted(options)} next to a head config; put them into the config")
        return head
    return HEADS[head_kind(head)].Config.from_options(options)


__all__ = [
    "HEADS", "DraftHead", "DraftVocabulary", "Eagle3Config", "Eagle3Head", "EagleConfig", "EagleHead", "HeadConfig",
    "HydraConfig", "HydraHead", "MedusaConfig", "MedusaHead", "MtpConfig", "MtpHead", "ParallelConfig", "ParallelHead",
    "TapBatch", "head_config", "head_kind",
]  # fmt: skip
