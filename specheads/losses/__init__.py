"""Losses of head training: targets of a batch, the base's probabilities, loss functions, metrics."""
