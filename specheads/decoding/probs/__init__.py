"""Probabilities: the target's under a generation config, the draft's, draws from them and divergences between them."""
