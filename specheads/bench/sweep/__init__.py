"""Sweeps over settings of drafting and acceptance on one set of prompts: speed against accuracy and divergence."""
