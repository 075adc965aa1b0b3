"""Many settings of drafting and acceptance on one set of prompts: curves of speed against accuracy and divergence."""
