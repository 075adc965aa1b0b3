"""Probabilities: the target's under a generation config, the draft's, sampling, and divergences between the two."""
