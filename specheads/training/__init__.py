"""A training run, from a recipe to a trained head, and what can end it early.

The folders that import accelerate call require_extra() first; the options of self_distill, which --help reads, do not.
"""

from specheads.options import require_packages


def require_extra() -> None:
    """ImportError, naming specheads[train], unless its packages are installed."""
    require_packages("train", "accelerate", "datasets", "peft")
