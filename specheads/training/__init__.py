"""A training run, from a recipe to a trained head, and what can end it early."""
