"""Timing decoders against one another on the same prompts, and reporting the results."""
