"""What a head is trained to match: targets of a batch, the base's probabilities, loss functions, metrics."""
