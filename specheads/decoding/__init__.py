"""Decoding: draft a tree, verify it in one pass of the target, commit what the acceptance rule accepts, repeat."""
