"""Drafters: whatever proposes a tree from a context."""

from specheads.drafters.base import Context, Drafter
from specheads.drafters.model import DraftModel

__all__ = ["Context", "DraftModel", "Drafter"]
