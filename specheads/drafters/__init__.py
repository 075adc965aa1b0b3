"""Drafters: whatever proposes a tree from a context."""

from specheads.drafters.base import Context, Drafter

__all__ = ["Context", "Drafter"]
