"""The trainer and its optimizers."""
