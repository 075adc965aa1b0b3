"""A training run, from a recipe to a trained head, and what can end it early."""

from specheads.options import require_packages

require_packages("train", "accelerate", "datasets", "peft")
