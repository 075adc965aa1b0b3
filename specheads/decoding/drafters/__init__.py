"""Drafters: objects that propose a tree from a context; and drafters by text, as generate() and the command line take
them: `auto`, `head`, `lookup:5`, `ngram`, `maxgram`; and by checkpoint, which the room above loads: `model:PATH`, a
head's folder, `cascade:DRAFTER+DRAFTER…`.

A new drafter that needs no model of its own is one file and one entry in DRAFTERS.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.drafters.base import Context, Drafter, with_defaults
from specheads.decoding.drafters.cascade import Cascade
from specheads.decoding.drafters.lookup import PromptLookup
from specheads.decoding.drafters.maxgram import MaxGram
from specheads.decoding.drafters.model import DraftModel
from specheads.decoding.drafters.ngram import NGram, NGramStorage, OneLevelNGramStorage
from specheads.decoding.drafters.path_drafter import PathDrafter
from specheads.decoding.planner.by_cost import CostTable
from specheads.decoding.registry import Registry
from specheads.options import refuse_unknown

__all__ = [
    "DRAFTERS", "AutoDrafter", "Cascade", "Context", "DraftModel", "Drafter", "MaxGram", "NGram", "NGramStorage",
    "OneLevelNGramStorage", "PathDrafter", "PromptLookup",
]  # fmt: skip


DRAFTERS: Registry[type[Drafter]] = Registry(
    "drafter", "drafter", {"lookup": PromptLookup, "ngram": NGram, "maxgram": MaxGram}
)

# (the text, the base, its head) → the drafter; specheads.models.named adds its own when it is imported.
CHECKPOINT_LOADERS: list[Callable[[str, Any, Drafter | None], Drafter]] = []


def gives_draft_probs(text: str) -> bool:
    """May the drafter of this name give draft probabilities? Copies, cascades and "auto" draft point masses."""
    kind = text.partition(":")[0]
    return kind not in ("auto", "cascade") and (kind not in DRAFTERS or bool(DRAFTERS[kind].gives_draft_probs))


def as_drafter(draft: Any, head: Drafter | None = None, base: Any = None) -> Drafter | None:
    """What `draft` stands for: True or "head" for `head`, "auto" for `AutoDrafter`, a text of DRAFTERS, a drafter
    itself; None for False, None or "none". base: for which checkpoints are loaded; None: they are refused.

    ValueError for "head" where there is none and for an unknown name; TypeError for what cannot draft.
    """
    if draft is None or draft is False or draft == "none":
        return None
    if draft is True or draft == "head":
        if head is None:
            raise ValueError(
                f"draft={draft!r}: this model has no head to draft with; load one with specheads.load_head(base, "
                "checkpoint) and call its generate(), or give draft='lookup' or a DraftModel(small)"
            )
        return head
    if isinstance(draft, str) and draft.partition(":")[0] == "auto":
        costs = draft.partition(":")[2]
        return AutoDrafter(head, CostTable.load(Path(costs)) if costs else None)
    if isinstance(draft, str) and base is not None and _names_checkpoint(draft) and CHECKPOINT_LOADERS:
        return CHECKPOINT_LOADERS[0](draft, base, head)
    if isinstance(draft, str):
        try:
            refuse_unknown([draft.partition(":")[0]], ["auto", "head", "none", *DRAFTERS], "drafter")
        except ValueError as error:
            raise ValueError(
                f"draft={draft!r}: {error}; for a head checkpoint give load_head(base, PATH).head, for a smaller "
                "model DraftModel(model)"
            ) from error
        return DRAFTERS.build(draft)
    return with_defaults(draft)


def _names_checkpoint(draft: str) -> bool:
    kind = draft.partition(":")[0]
    return kind in ("model", "cascade") or (kind not in DRAFTERS and ("/" in draft or Path(draft).is_dir()))
