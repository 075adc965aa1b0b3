"""Medusa and Hydra heads on disk: a file a form."""
