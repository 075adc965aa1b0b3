"""Draft a tree, verify it in one pass of the target, keep what the acceptance rule accepts, and again."""
